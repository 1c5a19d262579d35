from pathlib import Path

import distruntime as dr

Path("train.py").write_text(
    "import sys\n"
    "import distruntime as dr\n"
    "with dr.init_master_worker(quiet=True):\n"
    "    assert sys.argv[1:] == ['--lr', '0.1'] and len(dr.nodes()) == 4\n",
    encoding="utf-8",
)
