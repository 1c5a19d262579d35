import logging

import torch

import distruntime as dr

# %% dr.workers.add_worker()  # like the session's own: started here, or the next one that dials
assert model.weight.place == dr.place(0)
dr.shutdown()
dr.init_master_worker(world_size=1)
# %% class ShellWorker(dr.workers.WorkerProcess):
assert len(dr.nodes()) == 2
dr.shutdown()
# %% from distruntime.testing import check_launcher
assert len(dr.nodes()) == 4
dr.shutdown()
# The check kills workers.
logging.getLogger("distruntime").setLevel(logging.ERROR)
