// Every operator of the device, by one fallback: a meta kernel says what comes out, the allocator gives the
// memory, and a CPU's kernel fills it later, on the thread of the current stream.
//
// A launched kernel holds addresses and keeps nothing alive. So memory that was freed too early, or that another
// stream has not written yet, gives wrong values here as on a GPU.

#include <algorithm>
#include <cstring>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"
#include "runtime.h"

namespace simulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Stream& current_stream_of(const at::Tensor& tensor) {
  return current_stream(tensor.device().index());
}

// ---- tensors inside arguments and results ---------------------------------------------------------------

// Return the value with each of its tensors replaced by what `change` makes of it.
template <typename F>
IValue with_tensors(const IValue& value, const F& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
      changed.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

template <typename F>
void each_tensor(const IValue& value, const F& see) {
  with_tensors(value, [&](const at::Tensor& tensor) {
    see(tensor);
    return tensor;
  });
}

// ---- twins ----------------------------------------------------------------------------------------------

// A number that Python made of a literal does not decide the type of a result.
void wrap_as(at::Tensor& copy, const at::Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

// A tensor over the memory of another, or over none, on a device that has kernels.
at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto twin = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  twin.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  twin.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  twin._set_conj(like.is_conj());
  twin._set_neg(like.is_neg());
  wrap_as(twin, like);
  return twin;
}

// The tensors that stand for ours in one call, on the CPU or the meta device. Tensors that share memory have
// twins that share memory, so a kernel sees the same overlaps and makes the same views.
class Twins {
 public:
  explicit Twins(c10::DeviceType type)
      : type_(type), key_(type == c10::DeviceType::Meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU) {}

  at::Tensor of(const at::Tensor& real) {
    if (!is_ours(real)) {
      // A kernel reads a number of the host when it is launched, not when it runs.
      return real.defined() && type_ == c10::DeviceType::CPU ? copied(real) : real;
    }
    for (auto& [known, twin] : tensors_) {
      if (known.is_same(real)) {
        return twin;
      }
    }
    tensors_.emplace_back(real, over(storage_of(real.storage()), key_, real));
    return tensors_.back().second;
  }

  // The tensor of ours that a kernel has returned: one of its arguments, or a view of one. Undefined if it is new.
  at::Tensor real_of(const at::Tensor& result) const {
    for (auto& [real, twin] : tensors_) {
      if (twin.is_same(result)) {
        return real;
      }
    }
    for (auto& [real, twin] : tensors_) {
      if (twin.storage().is_alias_of(result.storage())) {
        return view_like(real, result);
      }
    }
    return {};
  }

 private:
  static at::Tensor copied(const at::Tensor& number) {
    at::Tensor copy = number.clone();
    wrap_as(copy, number);
    return copy;
  }

  static at::Tensor view_like(const at::Tensor& base, const at::Tensor& shape) {
    auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, shape.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(shape.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    view._set_conj(shape.is_conj());
    view._set_neg(shape.is_neg());
    return view;
  }

  c10::Storage storage_of(const c10::Storage& real) {
    for (auto& [known, twin] : storages_) {
      if (known.is_alias_of(real)) {
        return twin;
      }
    }
    bool meta = type_ == c10::DeviceType::Meta;
    void* data = meta ? nullptr : const_cast<void*>(real.data());
    // Meta storage may grow, which says that ours has to.
    storages_.emplace_back(
        real,
        c10::Storage(
            c10::Storage::use_byte_size_t(), real.nbytes(), c10::DataPtr(data, type_),
            meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr, /*resizable=*/meta));
    return storages_.back().second;
  }

  c10::DeviceType type_;
  c10::DispatchKey key_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

at::Tensor cpu_twin(const at::Tensor& real) {
  return Twins(c10::DeviceType::CPU).of(real);
}

// ---- memory of tensors ----------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "simulated devices have strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// What a program asks for, and not a kernel for its results, is filled where torch is to be deterministic.
at::Tensor filled(at::Tensor made) {
  const auto& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && settings.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(made);
  }
  return made;
}

at::Tensor new_empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  return filled(empty(sizes, dtype, layout, device, pin, format));
}

at::Tensor new_empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  return filled(empty_strided(sizes, strides, dtype, layout, device, pin));
}

// Give the tensor this geometry, and more memory if it needs that.
void reshape_in_place(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  size_t needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.dtype().itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) {
    at::Tensor shape = at::empty(sizes, at::TensorOptions(at::kMeta).dtype(self.dtype()));
    reshape_in_place(self, sizes, shape.strides());
  }
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::Tensor shape = at::empty(sizes, at::TensorOptions(at::kMeta).dtype(self.dtype()));
  reshape_in_place(self, sizes, strides.size() == sizes.size() && !sizes.empty() ? strides : shape.strides());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t length = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_at(self, std::move(storage), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- the fallback ---------------------------------------------------------------------------------------

// An operator that is going to run on the CPU's kernels.
struct Launch {
  c10::OperatorHandle op;
  Stack arguments;
  // Twins of what it returns, where that is new memory; undefined for the others.
  std::vector<at::Tensor> results;
  // What it draws random numbers with, and in which argument.
  std::optional<uint64_t> seed;
  size_t generator = 0;

  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    if (seed.has_value()) {
      arguments[generator] = at::detail::createCPUGenerator(*seed);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    size_t next = 0;
    for (const IValue& value : arguments) {
      each_tensor(value, [&](const at::Tensor& computed) {
        // A CPU's kernel leaves out what its backward does not need, as the statistics of a batch in evaluation.
        bool left_out = !computed.defined() || computed.numel() == 0;
        if (next < results.size() && results[next].defined() && !left_out) {
          results[next].copy_(computed);
        }
        next++;
      });
    }
  }
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool returns_new_memory(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return returned.alias_info() == nullptr;
  });
}

bool has_indices(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put" ||
      name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

// A mask as index: how many numbers it has is a question of values, unless each place gets the one number.
bool has_mask(const c10::OperatorHandle& op, const Stack& arguments) {
  bool found = false;
  if (has_indices(op)) {
    each_tensor(arguments[1], [&](const at::Tensor& index) {
      found = found || (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte));
    });
  }
  return found;
}

// The one device of a call. Its host tensors have a single number each, as a kernel takes those by value.
int device_of_call(const c10::OperatorHandle& op, Stack& arguments) {
  std::optional<c10::Device> found;
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(
            !found.has_value() || *found == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
            tensor.device(), "! (in ", op.schema().name(), ")");
        found = tensor.device();
      }
    });
  }
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kType && !found.has_value()) {
      found = value.toDevice();
    }
  }
  c10::Device device = found.value_or(c10::Device(kType, -1));
  if (!device.has_index()) {
    device.set_index(static_cast<c10::DeviceIndex>(current_device()));
  }
  for (IValue& value : arguments) {
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      bool at_home = !tensor.defined() || is_ours(tensor) || (tensor.device().is_cpu() && tensor.dim() == 0);
      if (!at_home && has_indices(op)) {
        // Indices may be on the host: they are copied to the device, and that waits.
        return tensor.to(device);
      }
      TORCH_CHECK(
          at_home, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
          tensor.device(), "! (in ", op.schema().name(), ")");
      return tensor;
    });
  }
  return device.index();
}

Stack for_kernels(const Stack& arguments, Twins& twins, c10::DeviceType type) {
  Stack changed;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kType) {
      changed.emplace_back(c10::Device(type));
    } else if (value.isGenerator()) {
      changed.emplace_back();
    } else {
      changed.push_back(with_tensors(value, [&](const at::Tensor& tensor) { return twins.of(tensor); }));
    }
  }
  return changed;
}

void seed_of(Launch& launch, const Stack& arguments, int device) {
  const auto& formal = launch.op.schema().arguments();
  for (size_t k = 0; k < formal.size(); k++) {
    if (formal[k].type()->str() == "Generator?" || formal[k].type()->str() == "Generator") {
      launch.generator = k;
      launch.seed = draw(
          arguments[k].isGenerator() ? std::optional<at::Generator>(arguments[k].toGenerator()) : std::nullopt, device);
    }
  }
}

void enqueue(Launch launch, int device) {
  std::string name = launch.op.schema().name();
  auto shared = std::make_shared<Launch>(std::move(launch));
  current_stream(device).launch(std::move(name), [shared] { shared->run(); });
}

// What a meta kernel has done to `out=` tensors and to tensors changed in place: their shapes.
void follow(const Stack& arguments, const Stack& metas, const c10::FunctionSchema& schema) {
  for (size_t k = 0; k < arguments.size(); k++) {
    if (!writes(schema.arguments()[k])) {
      continue;
    }
    std::vector<at::Tensor> after;
    each_tensor(metas[k], [&](const at::Tensor& meta) { after.push_back(meta); });
    size_t next = 0;
    each_tensor(arguments[k], [&](const at::Tensor& real) {
      const at::Tensor& meta = after[next++];
      if (is_ours(real) && (real.sizes() != meta.sizes() || real.strides() != meta.strides())) {
        reshape_in_place(real, meta.sizes(), meta.strides());
      }
    });
  }
}

// Sizes that depend on values: wait for the stream, run now, and copy the results to the device.
void run_now(const c10::OperatorHandle& op, Stack* stack, const Stack& arguments, int device) {
  const auto& schema = op.schema();
  synchronize(current_stream(device), counts().sizes);
  Twins twins(c10::DeviceType::CPU);
  Launch launch{op, for_kernels(arguments, twins, c10::DeviceType::CPU), {}, {}, 0};
  seed_of(launch, arguments, device);
  // An `out=` tensor gets its size from the result, so the kernel fills one that can grow.
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (size_t k = 0; k < arguments.size(); k++) {
    if (schema.arguments()[k].is_out()) {
      launch.arguments[k] = with_tensors(arguments[k], [&](const at::Tensor& real) {
        outs.emplace_back(real, at::empty({0}, real.options().device(at::kCPU)));
        return outs.back().second;
      });
    }
  }
  launch.run();
  torch::jit::drop(*stack, arguments.size());
  auto to_device = [&](const at::Tensor& computed, at::Tensor real) {
    if (computed.numel() > 0) {
      current_stream(device).launch(schema.name(), [computed, to = cpu_twin(real)] { to.copy_(computed); });
    }
    return real;
  };
  for (auto& [real, computed] : outs) {
    if (real.sizes() != computed.sizes()) {
      at::native::resize_output(real, computed.sizes());
    }
    to_device(computed, real);
  }
  for (const IValue& value : launch.arguments) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& computed) {
      if (!computed.defined()) {
        return computed;
      }
      for (auto& [real, out] : outs) {
        if (out.is_same(computed)) {
          return real;
        }
      }
      at::Tensor known = twins.real_of(computed);
      return known.defined()
          ? known
          : to_device(computed, at::empty_strided(
                                    computed.sizes(), computed.strides(),
                                    computed.options().device(c10::Device(kType, static_cast<c10::DeviceIndex>(device)))));
    }));
  }
}

// Return whether the operator has a meta kernel, after that has run.
bool run_meta(const c10::OperatorHandle& op, Stack& arguments) {
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &arguments);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

// What an operator returns that only writes into its arguments.
Stack written(const Stack& arguments, const c10::FunctionSchema& schema) {
  Stack found;
  for (size_t k = 0; k < arguments.size() && found.size() < schema.returns().size(); k++) {
    if (writes(schema.arguments()[k])) {
      found.push_back(arguments[k]);
    }
  }
  return found;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack arguments(stack->end() - static_cast<int64_t>(schema.arguments().size()), stack->end());
  int device = device_of_call(op, arguments);
  c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  check(device);

  bool has_meta = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  // Its CPU kernel returns other shapes than GPUs do, and its backward wants those.
  bool of_its_own_shape = schema.name() == "aten::_embedding_bag" || schema.name() == "aten::_embedding_bag_forward_only";
  bool mask = has_mask(op, arguments);
  bool one_number = mask && arguments.size() > 2 && arguments[2].toTensor().numel() == 1;
  // The meta kernels know masks only where they know their values.
  has_meta = has_meta && !mask;
  // `index` has the tag, but only a mask makes it so.
  bool depends_on_values = has_indices(op)
      ? mask && !one_number
      : op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  if (depends_on_values || of_its_own_shape) {
    run_now(op, stack, arguments, device);
    return;
  }

  Twins metas(c10::DeviceType::Meta);
  Stack before = for_kernels(arguments, metas, c10::DeviceType::Meta), outcome = before;
  has_meta = has_meta && run_meta(op, outcome);
  if (has_meta) {
    follow(arguments, before, schema);
  } else if (returns_new_memory(schema)) {
    run_now(op, stack, arguments, device);
    return;
  } else {
    outcome = written(before, schema);
  }

  Twins cpus(c10::DeviceType::CPU);
  Launch launch{op, {}, {}, {}, 0};
  bool computes = !has_meta;
  torch::jit::drop(*stack, arguments.size());
  for (const IValue& value : outcome) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& result) {
      at::Tensor real;
      if (result.defined()) {
        real = metas.real_of(result);
        if (!real.defined()) {
          computes = true;
          real = empty_strided(
              result.sizes(), result.strides(), result.scalar_type(), {}, c10::Device(kType, device), {});
          launch.results.push_back(cpus.of(real));
          return real;
        }
      }
      launch.results.emplace_back();
      return real;
    }));
  }
  for (const auto& argument : schema.arguments()) {
    computes = computes || writes(argument);
  }
  // Running statistics are written without the schema saying so, and an assertion returns nothing.
  if (computes || outcome.empty()) {
    launch.arguments = for_kernels(arguments, cpus, c10::DeviceType::CPU);
    seed_of(launch, arguments, device);
    enqueue(std::move(launch), device);
  }
}

// ---- copies ---------------------------------------------------------------------------------------------

// Bytes between a host's and a device's memory, in the device's current stream.
void copy_bytes(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool down = is_ours(from);
  const at::Tensor &host = down ? to : from, &ours = down ? from : to;
  int device = ours.device().index();
  size_t bytes = ours.nbytes();
  void* target = to.mutable_data_ptr();
  const void* source = from.const_data_ptr();
  Stream& stream = current_stream(device);
  if (non_blocking && is_pinned(host.const_data_ptr())) {
    stream.launch("copy", [=] { std::memcpy(target, source, bytes); });
    used_pinned(host.const_data_ptr(), device, current_stream_number(device));
    return;
  }
  if (non_blocking && !down) {
    // From pageable memory: the call returns when the bytes are staged, and waits for the stream before that.
    synchronize(stream, counts().copies);
    std::vector<char> staged(static_cast<const char*>(source), static_cast<const char*>(source) + bytes);
    stream.launch("copy", [target, staged = std::move(staged)] { std::memcpy(target, staged.data(), staged.size()); });
    return;
  }
  stream.launch("copy", [=] { std::memcpy(target, source, bytes); });
  synchronize(stream, counts().copies);
}

// The tensor without its conjugate and negative bits: what is in its memory.
at::Tensor in_memory(const at::Tensor& tensor) {
  at::Tensor plain = tensor.alias();
  plain._set_conj(false);
  plain._set_neg(false);
  return plain;
}

// Between host and device only bytes go: other types and layouts are made before on the source's side, or
// after on the target's.
void copy_across(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  at::Tensor target = in_memory(to), source = in_memory(from);
  if (source.scalar_type() != target.scalar_type()) {
    source = source.to(target.scalar_type());
  }
  bool alike = source.strides() == target.strides() && source.is_non_overlapping_and_dense();
  if (alike) {
    copy_bytes(target, source, non_blocking);
  } else {
    source = source.contiguous();
    at::Tensor whole = target.is_contiguous() ? target : at::empty_like(target, at::MemoryFormat::Contiguous);
    copy_bytes(whole, source, non_blocking);
    if (!whole.is_same(target)) {
      target.copy_(whole, non_blocking);
    }
  }
  // On the host this happens at once, also where the bytes are still to come: torch's CUDA copy is so too.
  if (to.is_conj() != from.is_conj()) {
    target.conj_physical_();
  }
  if (to.is_neg() != from.is_neg()) {
    target.neg_();
  }
}

// Both devices' current streams order a copy between them, which runs on the source's.
void copy_between(const at::Tensor& to, const at::Tensor& from) {
  Stream &source = current_stream_of(from), &target = current_stream_of(to);
  bool two = to.device() != from.device();
  if (two) {
    source.wait_for(target.mark());
  }
  source.launch("copy", [to = cpu_twin(to), from = cpu_twin(from)] { to.copy_(from); });
  if (two) {
    target.wait_for(source.mark());
  }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::assert_no_internal_overlap(target);
  at::Tensor from = source.expand_as(target);
  if (target.numel() == 0 || source.is_same(target)) {
    return target;
  }
  if (is_ours(from) && is_ours(target)) {
    copy_between(target, from);
  } else {
    c10::DeviceGuard guard(is_ours(from) ? from.device() : target.device());
    copy_across(target, from, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// Reading one number: the host waits once.
at::Scalar read(const at::Tensor& self) {
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  void* to = host.mutable_data_ptr();
  const void* from = self.const_data_ptr();
  Stream& stream = current_stream_of(self);
  stream.launch("aten::_local_scalar_dense", [=, bytes = self.itemsize()] { std::memcpy(to, from, bytes); });
  synchronize(stream, counts().copies);
  return host.item();
}

// ---- operators with a life of their own -----------------------------------------------------------------

// The CPU's kernel draws from the CPU's own generator, so it is put together of operators that take one.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  at::Tensor kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(kept).mul(scale), kept};
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
      self.sizes() == other.sizes() && self.strides() == other.strides();
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy sees conjugates as they are. Otherwise torch would resolve them before it, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &new_empty);
  m.impl("empty_strided", &new_empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("is_set_to", &is_set_to);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read);
  m.impl("native_dropout", &native_dropout);
  // torch puts these together of other operators unless the device has them. A GPU has each as one kernel.
  for (const char* whole : {"convolution", "convolution_backward", "native_layer_norm"}) {
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace simulated
