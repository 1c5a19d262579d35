"""Libraries of science: graphs, Gaussian processes, probabilistic programs, differential equations."""

from __future__ import annotations

import torch
from torch import nn

from cases import case


@case("torch-geometric", "GCN and GAT layers, DataLoader, pooling: training")
def geometric(device: str) -> dict[str, object]:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = GCNConv(4, 8), GATConv(8, 8), nn.Linear(8, 2)

        def forward(self, data: Data) -> torch.Tensor:
            hidden = self.first(data.x, data.edge_index).relu()
            hidden = self.second(hidden, data.edge_index).relu()
            found: torch.Tensor = self.out(global_mean_pool(hidden, data.batch))
            return found

    graphs = []
    for k in range(8):
        edges = torch.randint(0, 6, (2, 12))
        graphs.append(Data(x=torch.randn(6, 4), edge_index=edges, y=torch.tensor([k % 2])))
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(2):
        for batch in DataLoader(graphs, batch_size=4):
            batch = batch.to(device)
            loss = nn.functional.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses)}


@case("gpytorch", "an exact Gaussian process: train, predict", tolerance=1e-3)
def gpytorch(device: str) -> dict[str, object]:
    import gpytorch

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: nn.Module) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 20).to(device)
    y = torch.sin(x * 6.28)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model(x, y, likelihood).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        predicted = likelihood(model(torch.linspace(0, 1, 7).to(device)))
    return {"losses": torch.stack(losses), "mean": predicted.mean, "variance": predicted.variance}


@case("botorch", "SingleTaskGP, fit_gpytorch_mll, LogExpectedImprovement", tolerance=1e-2)
def botorch(device: str) -> dict[str, object]:
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(8, 2, dtype=torch.float64).to(device)
    y = 1 - (x - 0.5).norm(dim=-1, keepdim=True)
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(
        ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 5}}
    )
    improvement = LogExpectedImprovement(model, best_f=y.max())
    with torch.no_grad():
        return {"improvement": improvement(torch.linspace(0, 1, 6).double().view(3, 1, 2).to(device))}


@case("pyro-ppl", "SVI with an automatic guide", tolerance=1e-3)
def pyro(device: str) -> dict[str, object]:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    data = torch.linspace(-1, 1, 10).to(device) + 3
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)

    def model(data: torch.Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(zero, 10 * one))
        with pyro.plate("data", len(data)):
            pyro.sample("seen", dist.Normal(mean, one), obs=data)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    losses = [svi.step(data) for _ in range(4)]
    return {"losses": losses, "found": dict(pyro.get_param_store().items())}


@case("torchdiffeq", "odeint with rk4 and dopri5, odeint_adjoint")
def torchdiffeq(device: str) -> dict[str, object]:
    from torchdiffeq import odeint, odeint_adjoint

    field = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = field

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.field(y)
            return found

    start, times = torch.tensor([[1.0, 0.0]]).to(device), torch.linspace(0, 1, 4).to(device)
    flow = Flow()
    adjoint = odeint_adjoint(flow, start, times, method="rk4")
    adjoint.sum().backward()
    return {
        "rk4": odeint(flow, start, times, method="rk4"),
        "dopri5": odeint(flow, start, times, method="dopri5"),
        "adjoint": adjoint,
        "gradient": field[0].weight.grad,
    }


@case("torchsde", "sdeint, and its gradient", tolerance=1e-3)
def torchsde(device: str) -> dict[str, object]:
    import torchsde

    class Noise(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift = nn.Linear(2, 2)

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.drift(y)
            return found

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 0.1 * torch.ones_like(y)

    sde, start = Noise().to(device), torch.ones(3, 2).to(device)
    times = torch.linspace(0, 1, 3).to(device)
    path = torchsde.BrownianInterval(0.0, 1.0, size=(3, 2), device=device, entropy=0)
    found = torchsde.sdeint(sde, start, times, bm=path, dt=0.25, method="euler")
    found.sum().backward()
    return {"path": found, "gradient": sde.drift.weight.grad}


@case("e3nn", "a tensor product, and spherical harmonics", tolerance=1e-3)
def e3nn(device: str) -> dict[str, object]:
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e+4x1o", "1x0e+1x1o", "2x0e+2x1o").to(device)
    x, y = product.irreps_in1.randn(5, -1).to(device), product.irreps_in2.randn(5, -1).to(device)
    out = product(x, y)
    out.sum().backward()
    harmonics = o3.spherical_harmonics([0, 1, 2], torch.randn(5, 3).to(device), normalize=True)
    return {"out": out, "gradient": product.weight.grad, "harmonics": harmonics}


@case("snntorch", "leaky neurons with a surrogate gradient")
def snntorch(device: str) -> dict[str, object]:
    import snntorch as snn
    from snntorch import surrogate

    layer = nn.Linear(6, 3).to(device)
    neuron = snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid()).to(device)
    membrane = neuron.init_leaky()
    spikes = []
    for x in torch.rand(5, 2, 6).to(device):
        spike, membrane = neuron(layer(x) * 4, membrane)
        spikes.append(spike)
    torch.stack(spikes).sum().backward()
    return {"spikes": torch.stack(spikes), "membrane": membrane, "gradient": layer.weight.grad}
