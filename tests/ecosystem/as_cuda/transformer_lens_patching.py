"""TransformerLens: cache activations, ablate heads, and patch the residual stream."""

import json

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig, patching, utils

device = utils.get_device()
config = HookedTransformerConfig(
    n_layers=2,
    d_model=32,
    n_ctx=32,
    d_head=8,
    n_heads=4,
    d_vocab=50,
    act_fn="gelu",
    d_mlp=64,
    device=str(device),
    seed=0,
)
model = HookedTransformer(config)
torch.set_grad_enabled(False)
clean = torch.arange(10)[None].to(device)
corrupted = clean.clone()
corrupted[0, 3] = 20
clean_logits, cache = model.run_with_cache(clean)
corrupted_logits, _ = model.run_with_cache(corrupted)


def logit_diff(logits):
    return logits[0, -1, 3] - logits[0, -1, 4]


clean_diff, corrupted_diff = logit_diff(clean_logits), logit_diff(corrupted_logits)


def metric(logits):
    return (logit_diff(logits) - corrupted_diff) / (clean_diff - corrupted_diff)


patched = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
losses = []
for head in range(4):

    def ablate(z, hook, head=head):
        z[:, :, head] = 0
        return z

    loss = model.run_with_hooks(clean, return_type="loss", fwd_hooks=[(utils.get_act_name("z", 0), ablate)])
    losses.append(loss.item())
pattern = cache["pattern", 0]
found = {"diffs": [clean_diff.item(), corrupted_diff.item()], "patched": patched.tolist(), "losses": losses}
print(json.dumps({**found, "pattern": pattern.sum(-1).mean().item(), "where": str(clean_logits.device)}))
