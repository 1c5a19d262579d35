import sys
from pathlib import Path

import distruntime as dr

for name in ("my_package/__init__.py", "my_module.py", "src/within.py"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("def tell():\n    return __name__\n", encoding="utf-8")
sys.path.insert(0, "")
import my_module

dr.init_master_worker(world_size=2)
# %% the end


@dr.remote
def told():
    import my_module
    import my_package
    import within

    return [module.tell() for module in (my_package, my_module, within)]


assert dr.fetch(told(node=1)) == ["my_package", "my_module", "within"]
