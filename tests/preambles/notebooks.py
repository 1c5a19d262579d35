import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# %% dr.publish("run", {"model": model, "optimizer": optimizer})
model = torch.nn.Sequential(torch.nn.Linear(8, 4)).to("remote")
optimizer = torch.optim.AdamW(model.parameters())
losses = [model(torch.randn(2, 8, device="remote")).mean().detach() for _ in range(3)]
# %% the end
dr.shutdown()
