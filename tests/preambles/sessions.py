import logging

import torch

import distruntime as dr

# %% dr.workers.add_worker()  # like the session's own: started here, or the next one that dials
assert model.weight.place == dr.place(0)
dr.shutdown()
dr.init_master_worker(world_size=1)
# %% the end
assert len(dr.nodes()) == 2
