"""In the style of pytorch/examples' word_language_model: an LSTM or a Transformer, own SGD, a saved module.

It saves and loads as the original does: the whole module, and no word of a device.
"""

import argparse
import json
import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("LSTM", "Transformer"), default="LSTM")
parser.add_argument("--nhead", type=int, default=2)
parser.add_argument("--emsize", type=int, default=32)
parser.add_argument("--nhid", type=int, default=32)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=20)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--bptt", type=int, default=10)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action="store_true", default=True)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()
save = os.path.join(tempfile.mkdtemp(), "model.pt")

torch.manual_seed(args.seed)
if torch.cuda.is_available():
    print("CUDA:", torch.cuda.get_device_name(), "of", torch.cuda.device_count())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

words = ("the cat saw the dog and the dog saw a bird while a bird sang to the cat " * 60).split()
idx2word = sorted(set(words))
word2idx = {word: i for i, word in enumerate(idx2word)}
ids = torch.tensor([word2idx[word] for word in words], dtype=torch.int64)
ntokens = len(idx2word)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    data = data.view(bsz, -1).t().contiguous()
    return data.to(device)


train_data = batchify(ids[:800], args.batch_size)
val_data = batchify(ids[800:], 4)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(args.dropout)
        self.encoder = nn.Embedding(ntokens, args.emsize)
        self.rnn = nn.LSTM(args.emsize, args.nhid, args.nlayers, dropout=args.dropout)
        self.decoder = nn.Linear(args.nhid, ntokens)
        if args.tied:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntokens)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        shape = (args.nlayers, bsz, args.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


class TransformerModel(nn.Transformer):
    def __init__(self):
        super().__init__(
            d_model=args.emsize,
            nhead=args.nhead,
            dim_feedforward=args.nhid,
            num_encoder_layers=args.nlayers,
            num_decoder_layers=1,
            dropout=args.dropout,
        )
        self.src_mask = None
        self.input_emb = nn.Embedding(ntokens, args.emsize)
        self.decoder = nn.Linear(args.emsize, ntokens)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
            self.src_mask = mask.to(src.device)
        src = self.input_emb(src) * math.sqrt(args.emsize)
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return F.log_softmax(output, dim=-1).view(-1, ntokens)


recurrent = args.model == "LSTM"
model = (RNNModel() if recurrent else TransformerModel()).to(device)
criterion = nn.NLLLoss()
torch.manual_seed(args.seed)


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(4) if recurrent else None
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            if recurrent:
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
            else:
                output = model(data)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


log = []
best_val_loss = None
lr = args.lr
for epoch in range(1, args.epochs + 1):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(args.batch_size) if recurrent else None
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        if recurrent:
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
        else:
            output = model(data)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur_loss = total_loss / args.log_interval
            print(f"| epoch {epoch} | {batch} batches | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}")
            log.append(cur_loss)
            total_loss = 0
    val_loss = evaluate(val_data)
    log.append(val_loss)
    if not best_val_loss or val_loss < best_val_loss:
        with open(save, "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0

known = [
    *(RNNModel, TransformerModel, nn.Dropout, nn.Embedding, nn.LayerNorm, nn.Linear, nn.LSTM, F.relu),
    *(nn.ModuleList, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear),
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer),
]
with open(save, "rb") as f, torch.serialization.safe_globals(known):
    model = torch.load(f)
if recurrent:
    model.rnn.flatten_parameters()
log.append(evaluate(val_data))

torch.manual_seed(args.seed)
hidden = model.init_hidden(1) if recurrent else None
input = torch.zeros(1, 1, dtype=torch.long).to(device)
generated = []
model.eval()
with torch.no_grad():
    for _ in range(12):
        if recurrent:
            output, hidden = model(input, hidden)
        else:
            output = model(input)[-1]
        word_weights = output.squeeze().exp().cpu()
        word_idx = torch.multinomial(word_weights, 1)[0]
        if recurrent:
            input.fill_(word_idx)
        else:
            input = torch.cat([input, torch.full((1, 1), int(word_idx)).to(device)], 0)
        generated.append(idx2word[word_idx])
print(" ".join(generated))
where = str(next(model.parameters()).device)
print(json.dumps({"log": log, "generated": generated, "where": where}))
