// Cells of recurrent layers: torch asks GPUs, and devices like this one, for these; CPUs have no kernels for them.

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using Optional = std::optional<at::Tensor>;

Tensor biased(const Tensor& gates, const Optional& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor zeros_if_absent(const Optional& grad, const Tensor& like) {
  return grad.has_value() && grad->defined() ? *grad : at::zeros_like(like);
}

Tensor through_sigmoid(const Tensor& grad, const Tensor& out) {
  return grad * out * (1 - out);
}

Tensor through_tanh(const Tensor& grad, const Tensor& out) {
  return grad * (1 - out * out);
}

Tensor sum_for_bias(const Tensor& grad, bool has_bias) {
  return has_bias ? grad.sum(0) : Tensor();
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell, const Optional& input_bias,
    const Optional& hidden_bias) {
  auto gates = (biased(from_input, input_bias) + biased(from_hidden, hidden_bias)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), value = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor next = forget * cell + in * value;
  return {out * next.tanh(), next, at::cat({in, forget, value, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& grad_hidden, const Optional& grad_next, const Tensor& cell, const Tensor& next,
    const Tensor& gates, bool has_bias) {
  auto kept = gates.chunk(4, 1);
  const Tensor &in = kept[0], &forget = kept[1], &value = kept[2], &out = kept[3];
  Tensor hidden = zeros_if_absent(grad_hidden, next), squashed = next.tanh();
  Tensor grad = through_tanh(hidden * out, squashed) + zeros_if_absent(grad_next, next);
  Tensor grad_gates = at::cat(
      {through_sigmoid(grad * value, in), through_sigmoid(grad * cell, forget), through_tanh(grad * in, value),
       through_sigmoid(hidden * squashed, out)},
      1);
  return {grad_gates, grad * forget, sum_for_bias(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& hidden, const Optional& input_bias,
    const Optional& hidden_bias) {
  auto a = biased(from_input, input_bias).chunk(3, 1), b = biased(from_hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid(), fresh = (a[2] + reset * b[2]).tanh();
  return {fresh + update * (hidden - fresh), at::cat({reset, update, fresh, hidden, b[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hidden = kept[3], &from_hidden = kept[4];
  Tensor grad_fresh = through_tanh(grad * (1 - update), fresh);
  Tensor grad_update = through_sigmoid(grad * (hidden - fresh), update);
  Tensor grad_reset = through_sigmoid(grad_fresh * from_hidden, reset);
  Tensor to_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor to_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {to_input, to_hidden, grad * update, sum_for_bias(to_input, has_bias), sum_for_bias(to_hidden, has_bias)};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace simulated
