"""kvpass does not import vLLM."""

import subprocess
import sys


def test_import_kvpass_does_not_import_the_plug_in():
    code = "import sys, kvpass; sys.exit(bool({'vllm', 'kvpass.vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
