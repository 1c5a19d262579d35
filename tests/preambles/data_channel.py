import logging
import sys
from pathlib import Path

import distruntime as dr

# %% from distruntime.testing import check_data_channel
dr.shutdown()
sys.path.insert(0, str(Path(dr.__file__).parents[1] / "examples"))
channel = __import__("08_own_channel").SharedFolder
dr.distributed.register_data_channel("mine", channel)
# The suite kills workers.
logging.getLogger("distruntime").setLevel(logging.ERROR)
