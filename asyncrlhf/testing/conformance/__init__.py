"""One suite per seam, for every implementation of it: `RUNTIME`, `GENERATE_ENGINE` and `WEIGHT_TRANSFER` are checks to
parametrise a test over.

Example: @pytest.mark.parametrize("check", RUNTIME, ids=lambda check: check.__name__)
         def test_my_runtime(check, tmp_path): asyncio.run(check(MyRuntime(), tmp_path))
"""

from asyncrlhf.testing.conformance.generate import GENERATE_ENGINE as GENERATE_ENGINE
from asyncrlhf.testing.conformance.generate import GenerateSubject as GenerateSubject
from asyncrlhf.testing.conformance.runtime import RUNTIME as RUNTIME
from asyncrlhf.testing.conformance.transfer import WEIGHT_TRANSFER as WEIGHT_TRANSFER
from asyncrlhf.testing.conformance.transfer import TransferSubject as TransferSubject
