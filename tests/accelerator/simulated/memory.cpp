#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "runtime.h"

namespace simulated {
namespace {

// Neither zeros nor ones, and out of range as an index: 3.4e38 as float32, NaN as float16.
constexpr int kScribble = 0x7f;

size_t rounded(size_t bytes) {
  constexpr size_t kSmallest = 512;
  return (bytes + kSmallest - 1) / kSmallest * kSmallest;
}

void* from_system(size_t bytes) {
  void* found = nullptr;
  return posix_memalign(&found, 512, bytes) == 0 ? found : nullptr;
}

// A use is a stream's number on a device.
using Use = std::pair<int, int64_t>;

struct Block {
  char* data;
  size_t size;
  int device;
  // Who gets the block next takes it on this stream, so what comes there before is over by then.
  int64_t stream;
  size_t asked = 0;
  bool taken = true;
  // Other streams use it, by `record_stream`, or a copy's stream if it is pinned.
  std::set<Use> uses;
  // These marks stand behind the uses, since the block was freed.
  std::vector<MarkPtr> awaited;
};

// Finds the block around an address.
class Blocks {
 public:
  void add(Block* block) { at_[block->data] = block; }
  void remove(Block* block) { at_.erase(block->data); }
  Block* around(const void* address) const {
    auto found = at_.upper_bound(static_cast<const char*>(address));
    if (found == at_.begin()) {
      return nullptr;
    }
    Block* block = (--found)->second;
    return static_cast<const char*>(address) < block->data + block->size ? block : nullptr;
  }

 private:
  std::map<const char*, Block*> at_;
};

bool all_passed(std::vector<MarkPtr>& marks) {
  while (!marks.empty() && marks.back()->passed()) {
    marks.pop_back();
  }
  return marks.empty();
}

// ---- device memory --------------------------------------------------------------------------------------

// One device's. A freed block is taken again by its own stream at once: the order of the stream makes that
// right, and makes it wrong for everyone else who still uses it without `record_stream`.
struct Memory {
  std::mutex mutex;
  std::multimap<std::pair<int64_t, size_t>, Block*> free;
  // These are freed, but their uses are not over.
  std::vector<Block*> waiting;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

void scribble(Block* block) {
  if (knobs().scribble) {
    stream(block->device, block->stream).quietly([data = block->data, size = block->size] {
      std::memset(data, kScribble, size);
    });
  }
}

struct Memories {
  std::vector<std::unique_ptr<Memory>> of_device;
  std::mutex mutex;
  Blocks blocks;
};

Memories& memories() {
  static Memories& found = *[] {
    auto* made = new Memories;
    for (int k = 0; k < device_count(); k++) {
      made->of_device.push_back(std::make_unique<Memory>());
    }
    return made;
  }();
  return found;
}

size_t reserved(Memory& memory) {
  return static_cast<size_t>(memory.stats.reserved_bytes[0].current);
}

void take(Memory& memory, Block* block, size_t asked) {
  block->taken = true;
  block->asked = asked;
  memory.stats.allocation[0].increase(1);
  memory.stats.active[0].increase(1);
  memory.stats.allocated_bytes[0].increase(block->size);
  memory.stats.active_bytes[0].increase(block->size);
  memory.stats.requested_bytes[0].increase(asked);
}

void give(Memory& memory, Block* block) {
  memory.stats.active[0].decrease(1);
  memory.stats.active_bytes[0].decrease(block->size);
  scribble(block);
  memory.free.insert({{block->stream, block->size}, block});
}

void give_what_is_over(Memory& memory) {
  for (size_t k = 0; k < memory.waiting.size();) {
    Block* block = memory.waiting[k];
    if (all_passed(block->awaited)) {
      memory.waiting.erase(memory.waiting.begin() + static_cast<int64_t>(k));
      give(memory, block);
    } else {
      k++;
    }
  }
}

// Give cached blocks back to the system. As cudaFree does, it waits for the device.
void empty(int device, Memory& memory) {
  for (Block* block : memory.waiting) {
    for (auto& mark : block->awaited) {
      mark->wait();
    }
  }
  give_what_is_over(memory);
  if (memory.free.empty()) {
    return;
  }
  synchronize_device(device);
  for (auto& [_, block] : memory.free) {
    {
      std::lock_guard<std::mutex> lock(memories().mutex);
      memories().blocks.remove(block);
    }
    memory.stats.segment[0].decrease(1);
    memory.stats.reserved_bytes[0].decrease(block->size);
    std::free(block->data);
    delete block;
  }
  memory.free.clear();
}

// One for twice as much would be a waste. The one that was freed last comes first: who still uses it wrongly is
// most likely to be seen so.
Block* cached(Memory& memory, int64_t stream, size_t size) {
  auto found = memory.free.lower_bound({stream, size});
  if (found == memory.free.end() || found->first.first != stream || found->first.second >= 2 * size) {
    return nullptr;
  }
  found = std::prev(memory.free.upper_bound(found->first));
  Block* block = found->second;
  memory.free.erase(found);
  return block;
}

Block* allocate_block(int device, size_t asked) {
  counts().allocations++;
  Memory& memory = *memories().of_device[device];
  int64_t stream = current_stream_number(device);
  size_t size = rounded(asked);
  std::lock_guard<std::mutex> lock(memory.mutex);
  give_what_is_over(memory);
  Block* block = cached(memory, stream, size);
  if (block == nullptr) {
    // Only what the cache does not have is asked of the device, and so only this notices that it is lost.
    check(device);
    if (reserved(memory) + size > knobs().memory) {
      memory.stats.num_alloc_retries++;
      empty(device, memory);
    }
    void* data = reserved(memory) + size > knobs().memory ? nullptr : from_system(size);
    if (data == nullptr) {
      memory.stats.num_ooms++;
      constexpr double kMiB = 1024.0 * 1024.0;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false,
          "simulated out of memory. Tried to allocate ", static_cast<double>(asked) / kMiB, " MiB. Device ", device,
          " has a total capacity of ", static_cast<double>(knobs().memory) / kMiB, " MiB of which ",
          static_cast<double>(knobs().memory - reserved(memory)) / kMiB, " MiB is free. ",
          static_cast<double>(memory.stats.allocated_bytes[0].current) / kMiB, " MiB is allocated by PyTorch.");
    }
    block = new Block{static_cast<char*>(data), size, device, stream};
    memory.stats.segment[0].increase(1);
    memory.stats.reserved_bytes[0].increase(size);
    {
      std::lock_guard<std::mutex> all(memories().mutex);
      memories().blocks.add(block);
    }
    scribble(block);
  }
  take(memory, block, asked);
  return block;
}

// On a lost device the mark for a use raises, and a destructor that raises ends the process: as for CUDA.
void free_block(void* context) {
  Block* block = static_cast<Block*>(context);
  Memory& memory = *memories().of_device[block->device];
  std::lock_guard<std::mutex> lock(memory.mutex);
  block->taken = false;
  memory.stats.allocation[0].decrease(1);
  memory.stats.allocated_bytes[0].decrease(block->size);
  memory.stats.requested_bytes[0].decrease(block->asked);
  for (auto& [device, number] : block->uses) {
    block->awaited.push_back(stream(device, number).mark());
  }
  if (block->uses.empty()) {
    give(memory, block);
  } else {
    block->uses.clear();
    memory.waiting.push_back(block);
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
    check_index(device.index());
    if (bytes == 0) {
      return {nullptr, device};
    }
    Block* block = allocate_block(device.index(), bytes);
    return {block->data, block, &free_block, device};
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (int k = 0; k < device_count(); k++) {
      Memory& memory = *memories().of_device[k];
      std::lock_guard<std::mutex> lock(memory.mutex);
      empty(k, memory);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream used) override {
    if (pointer.get() == nullptr || pointer.get_deleter() != &free_block) {
      return;
    }
    Block* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard<std::mutex> lock(memories().of_device[block->device]->mutex);
    if (used.device_index() != block->device || used.id() != block->stream) {
      block->uses.insert({used.device_index(), used.id()});
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Memory& memory = of(device);
    std::lock_guard<std::mutex> lock(memory.mutex);
    return memory.stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Memory& memory = of(device);
    check(device);
    std::lock_guard<std::mutex> lock(memory.mutex);
    return {knobs().memory - reserved(memory), knobs().memory};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    int device = device_of(to);
    current_stream(device).launch("copy_data", [=] { std::memcpy(to, from, bytes); });
  }

 private:
  static Memory& of(c10::DeviceIndex device) {
    check_index(device);
    return *memories().of_device[device];
  }

  template <typename F>
  void each_stat(c10::DeviceIndex device, F change) {
    Memory& memory = of(device);
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto& s = memory.stats;
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                        &s.requested_bytes}) {
      for (auto& stat : *stats) {
        change(stat);
      }
    }
  }
};

// ---- pinned memory --------------------------------------------------------------------------------------

struct Pinned {
  std::mutex mutex;
  Blocks blocks;
  std::multimap<size_t, Block*> free;
  std::vector<Block*> waiting;
  int64_t bytes = 0;
};

Pinned& pinned() {
  static Pinned& found = *new Pinned;
  return found;
}

void free_pinned(void* context) {
  Block* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  block->taken = false;
  for (auto& [device, number] : block->uses) {
    block->awaited.push_back(stream(device, number).mark());
  }
  block->uses.clear();
  pinned().waiting.push_back(block);
}

// Memory that nobody uses any more is scribbled over here, by the host.
void pinned_that_is_over() {
  auto& waiting = pinned().waiting;
  for (size_t k = 0; k < waiting.size();) {
    Block* block = waiting[k];
    if (all_passed(block->awaited)) {
      waiting.erase(waiting.begin() + static_cast<int64_t>(k));
      if (knobs().scribble) {
        std::memset(block->data, kScribble, block->size);
      }
      pinned().free.insert({block->size, block});
    } else {
      k++;
    }
  }
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::DeviceType::CPU};
    }
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned_that_is_over();
    size_t size = rounded(bytes);
    Block* block = nullptr;
    if (auto found = pinned().free.lower_bound(size); found != pinned().free.end() && found->first < 2 * size) {
      block = found->second;
      pinned().free.erase(found);
    } else {
      void* data = from_system(size);
      TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the host has no ", bytes, " bytes to pin");
      block = new Block{static_cast<char*>(data), size, -1, 0};
      pinned().blocks.add(block);
      pinned().bytes += static_cast<int64_t>(size);
    }
    block->taken = true;
    return {block->data, block, &free_pinned, c10::DeviceType::CPU};
  }

  bool record_event(void* address, void*, c10::Stream used) override {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    Block* block = pinned().blocks.around(address);
    if (block == nullptr || !block->taken) {
      return false;
    }
    block->uses.insert({used.device_index(), used.id()});
    return true;
  }

  void empty_cache() override {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned_that_is_over();
    for (auto& [size, block] : pinned().free) {
      pinned().bytes -= static_cast<int64_t>(size);
      pinned().blocks.remove(block);
      std::free(block->data);
      delete block;
    }
    pinned().free.clear();
  }

  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    at::HostStats stats;
    stats.allocated_bytes.current = pinned().bytes;
    return stats;
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* found = new DeviceMemory;
  return found;
}

at::HostAllocator* pinned_allocator() {
  static auto* found = new PinnedMemory;
  return found;
}

int device_of(const void* address) {
  std::lock_guard<std::mutex> lock(memories().mutex);
  Block* block = memories().blocks.around(address);
  return block == nullptr ? -1 : block->device;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().blocks.around(address) != nullptr;
}

void used_pinned(const void* address, int device, int64_t stream) {
  pinned_allocator()->record_event(
      const_cast<void*>(address), nullptr,
      c10::Stream(
          c10::Stream::UNSAFE,
          c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
          stream));
}

} // namespace simulated
