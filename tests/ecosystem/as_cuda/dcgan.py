"""In the style of pytorch/examples' dcgan: two networks, weights drawn on the device, fixed noise."""

import argparse
import json
import os
import tempfile

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--nz", type=int, default=8)
parser.add_argument("--ngf", type=int, default=8)
parser.add_argument("--ndf", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--ngpu", type=int, default=1)
parser.add_argument("--manualSeed", type=int, default=7)
opt = parser.parse_args()
torch.manual_seed(opt.manualSeed)
cudnn.benchmark = True
device = torch.device("cuda:0" if torch.cuda.is_available() and opt.ngpu > 0 else "cpu")

images = torch.tensor(load_digits().images, dtype=torch.float32)[:512, None] / 8 - 1
order = torch.Generator().manual_seed(opt.manualSeed)
dataloader = DataLoader(TensorDataset(images), batch_size=opt.batchSize, shuffle=True, generator=order)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, ngpu):
        super().__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(opt.ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(opt.ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        if input.is_cuda and self.ngpu > 1:
            return nn.parallel.data_parallel(self.main, input, range(self.ngpu))
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ngpu):
        super().__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(
            nn.Conv2d(1, opt.ndf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(opt.ndf),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG, netD = Generator(opt.ngpu).to(device), Discriminator(opt.ngpu).to(device)
torch.manual_seed(opt.manualSeed)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

log = []
for i, (data,) in enumerate(dataloader):
    netD.zero_grad()
    real_cpu = data.to(device)
    batch_size = real_cpu.size(0)
    label = torch.full((batch_size,), 1, dtype=real_cpu.dtype, device=device)
    output = netD(real_cpu)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.mean().item()

    noise = torch.randn(batch_size, opt.nz, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(0)
    output = netD(fake.detach())
    errD_fake = criterion(output, label)
    errD_fake.backward()
    D_G_z1 = output.mean().item()
    errD = errD_real + errD_fake
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1)
    output = netD(fake)
    errG = criterion(output, label)
    errG.backward()
    D_G_z2 = output.mean().item()
    optimizerG.step()
    log += [errD.item(), errG.item(), D_x, D_G_z1, D_G_z2]
    print(f"[{i}/{len(dataloader)}] Loss_D: {log[-5]:.4f} Loss_G: {log[-4]:.4f} D(x): {D_x:.4f}")

fake = netG(fixed_noise)
path = os.path.join(tempfile.mkdtemp(), "netG.pth")
torch.save(netG.state_dict(), path)
netG.load_state_dict(torch.load(path))
print(json.dumps({"log": log, "fake": fake.detach().cpu().mean().item(), "where": str(fake.device)}))
