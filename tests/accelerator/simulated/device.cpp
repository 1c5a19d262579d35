// The device as torch sees it: its guard, its hooks, its generators, and what its Python module asks.

#include <cstring>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"
#include "runtime.h"

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_named(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// ---- devices, streams and events ------------------------------------------------------------------------

struct Event {
  int device;
  bool timed;
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    set_current_device(index_of(device));
    return before;
  }

  c10::Device getDevice() const override {
    return device_named(current_device());
  }

  void setDevice(c10::Device device) const override {
    set_current_device(index_of(device));
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (index_of(device) < device_count()) {
      set_current_device(index_of(device));
    }
  }

  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return named(index, current_stream_number(index));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return named(index_of(device), kDefaultStream);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    int index = index_of(device);
    return named(index, take_stream(index, priority));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    int index = stream.device_index();
    c10::Stream before = named(index, current_stream_number(index));
    set_current_stream_number(index, stream.id());
    return before;
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &of(stream);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event{stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT, nullptr};
    }
    auto* recorded = static_cast<Event*>(*event);
    TORCH_CHECK(
        recorded->device == stream.device_index(), "an event of simulated:", recorded->device,
        " cannot be recorded on a stream of simulated:", static_cast<int>(stream.device_index()));
    recorded->mark = of(stream).mark();
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      of(stream).wait_for(static_cast<Event*>(event)->mark);
    }
  }

  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    check(static_cast<Event*>(event)->device);
    return static_cast<Event*>(event)->mark->passed();
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_wait(static_cast<Event*>(event)->device, *static_cast<Event*>(event)->mark, counts().events);
    }
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from->timed && to->timed, "Both events must be created with argument 'enable_timing=True'.");
    check(from->device);
    TORCH_CHECK(from->device == to->device, "simulated error: the events are of two devices");
    TORCH_CHECK(from->mark->passed() && to->mark->passed(), "simulated error: device not ready");
    return std::chrono::duration<double, std::milli>(to->mark->when() - from->mark->when()).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    return of(stream).idle();
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(of(stream), counts().streams);
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

 private:
  static c10::Stream named(int index, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, device_named(index), number);
  }

  static Stream& of(const c10::Stream& named) {
    return stream(named.device_index(), named.id());
  }
};

// ---- random numbers -------------------------------------------------------------------------------------

// The state of a counter-based generator: a seed and how far it has got, 8 bytes each.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::Device device, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), seed_(seed) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.numel() * state.itemsize() == sizeof seed_ + sizeof offset_,
        "RNG state of a simulated device is 16 bytes in a CPU tensor");
    auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, sizeof seed_);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

  // What one launch draws with: equal for equal states, and different for the next launch.
  uint64_t draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ + 0x9e3779b97f4a7c15ull * (offset_ / 4 + 1);
    offset_ += 4;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 31);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_, seed_);
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_, offset_ = 0;
};

const at::Generator& default_generator(int device) {
  static auto& found = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int k = 0; k < device_count(); k++) {
      made->push_back(at::make_generator<Generator>(device_named(k)));
    }
    return made;
  }();
  device = device < 0 ? current_device() : device;
  check_index(device);
  return found[device];
}

} // namespace

uint64_t draw(const std::optional<at::Generator>& given, int device) {
  const at::Generator& generator = given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a 'simulated' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
}

namespace {

// ---- hooks ----------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return in_use(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    int device = device_of(data);
    TORCH_CHECK(device >= 0, "the pointer is not in the memory of a simulated device");
    return device_named(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device_named(device < 0 ? current_device() : device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = device_allocator()->allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
      current_stream(storage.device().index()).launch("resize", [to = fresh.get(), from = storage.data(), kept] {
        std::memcpy(to, from, kept);
      });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ---- what the Python module asks ------------------------------------------------------------------------

std::vector<int64_t> counted() {
  Counts& c = counts();
  return {c.events, c.streams, c.devices, c.copies, c.sizes, c.kernels, c.allocations};
}

void set_delay(int64_t microseconds) {
  TORCH_CHECK(microseconds >= 0, "a delay is a number of microseconds of at least 0; got ", microseconds);
  knobs().delay_us = microseconds;
}

void hold(bool held) {
  knobs().held = held;
}

// The number that the machine gives a device which this process calls `device`.
int64_t number_on_machine(int64_t device) {
  check_index(static_cast<int>(device));
  return knobs().visible[device];
}

} // namespace

TORCH_LIBRARY(simulated, m) {
  m.def("counted", &counted);
  m.def("set_delay", &set_delay);
  m.def("hold", &hold);
  m.def("number_on_machine", &number_on_machine);
  m.def("device_count", [] { return static_cast<int64_t>(device_count()); });
  m.def("memory", [] { return static_cast<int64_t>(knobs().memory); });
  m.def("in_bad_fork", &in_bad_fork);
  m.def("in_use", [](int64_t device) { return in_use(static_cast<int>(device)); });
  m.def("default_generator", [](int64_t device) { return default_generator(static_cast<int>(device)); });
}

// ---- registration, when the library is loaded -----------------------------------------------------------

static const bool registered = [] {
  c10::SetAllocator(kType, device_allocator());
  at::setHostAllocator(kType, pinned_allocator());
  c10::impl::registerDeviceGuard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace simulated
