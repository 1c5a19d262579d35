#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <c10/util/Exception.h>

namespace simulated {

// ---- knobs ----------------------------------------------------------------------------------------------

static int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return otherwise;
  }
  char* end = nullptr;
  int64_t found = std::strtoll(text, &end, 10);
  TORCH_CHECK(*end == '\0' && found >= 0, name, " is a number of at least 0; got '", text, "'");
  return found;
}

static std::vector<int> visible_of(int devices) {
  std::vector<int> found;
  const char* text = std::getenv("SIMULATED_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int k = 0; k < devices; k++) {
      found.push_back(k);
    }
    return found;
  }
  // As CUDA does: the list ends at the first entry that names nothing.
  std::istringstream entries(text);
  std::string entry;
  while (std::getline(entries, entry, ',')) {
    char* end = nullptr;
    int64_t k = std::strtoll(entry.c_str(), &end, 10);
    if (end == entry.c_str() || *end != '\0' || k < 0 || k >= devices) {
      break;
    }
    found.push_back(static_cast<int>(k));
  }
  return found;
}

Knobs& knobs() {
  static Knobs& found = *[] {
    int devices = static_cast<int>(std::min<int64_t>(from_environment("SIMULATED_DEVICES", 2), 64));
    return new Knobs{
        devices,
        visible_of(devices),
        {from_environment("SIMULATED_DELAY_US", 0)},
        from_environment("SIMULATED_SCRIBBLE", 1) != 0,
        static_cast<size_t>(from_environment("SIMULATED_MEMORY", int64_t{1} << 30)),
        from_environment("SIMULATED_LAUNCH_BLOCKING", 0) != 0};
  }();
  return found;
}

Counts& counts() {
  static Counts& found = *new Counts;
  return found;
}

// ---- the state of the process ---------------------------------------------------------------------------

namespace {

// As many streams of each priority as CUDA's pool has. A program that asks for more shares them.
constexpr int64_t kPool = 32;

struct Device {
  std::vector<std::unique_ptr<Stream>> streams;
  std::atomic<int64_t> taken[2] = {0, 0};
  std::atomic<bool> used{false};
  std::atomic<bool> lost{false};
};

std::atomic<bool> closing{false};
std::atomic<bool> bad_fork{false};

// The threads outlive the end of `main`, so nothing of this is ever destroyed.
std::vector<std::unique_ptr<Device>>& devices() {
  static std::vector<std::unique_ptr<Device>>& found = *[] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (size_t k = 0; k < knobs().visible.size(); k++) {
      made->push_back(std::make_unique<Device>());
      for (int64_t n = 0; n < 1 + 2 * kPool; n++) {
        made->back()->streams.push_back(std::make_unique<Stream>(static_cast<int>(k)));
      }
    }
    pthread_atfork(nullptr, nullptr, [] {
      for (auto& device : devices()) {
        bad_fork = bad_fork || device->used;
      }
    });
    return made;
  }();
  return found;
}

// torch's own statics are destroyed after this one, as they were made before it. So no kernel runs then.
struct AtExit {
  ~AtExit() {
    if (bad_fork) {
      return;
    }
    closing = true;
    for (auto& device : devices()) {
      if (device->used) {
        for (auto& stream : device->streams) {
          stream->close();
        }
      }
    }
  }
} at_exit;

void lose(int device, const std::string& kernel, const char* why) {
  // CUDA prints a failed assertion too; the error itself does not know which kernel it was.
  std::fprintf(stderr, "simulated:%d: the kernel of %s failed: %s\n", device, kernel.c_str(), why);
  devices()[device]->lost = true;
}

} // namespace

bool in_bad_fork() {
  return bad_fork;
}

// ---- marks ----------------------------------------------------------------------------------------------

void Mark::pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  when_ = Clock::now();
  passed_ = true;
  changed_.notify_all();
}

bool Mark::passed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return passed_;
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

// ---- streams --------------------------------------------------------------------------------------------

void Stream::push(Task task) {
  TORCH_CHECK(
      !bad_fork,
      "Cannot re-initialize simulated in forked subprocess. To use it with multiprocessing, you must use the "
      "'spawn' start method");
  std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable()) {
    devices()[device_]->used = true;
    thread_ = std::thread([this] { run(); });
  }
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void Stream::launch(std::string name, std::function<void()> kernel) {
  check(device_);
  counts().kernels++;
  push({std::move(name), std::move(kernel), true});
  if (knobs().blocking) {
    MarkPtr done = mark();
    done->wait();
    check(device_);
  }
}

MarkPtr Stream::mark() {
  check(device_);
  auto mark = std::make_shared<Mark>();
  push({"mark", [mark] { mark->pass(); }, false});
  return mark;
}

void Stream::wait_for(MarkPtr mark) {
  check(device_);
  push({"wait", [mark] { mark->wait(); }, false});
}

void Stream::quietly(std::function<void()> kernel) {
  if (!bad_fork && !closing) {
    push({"scribble", [this, kernel] { if (!lost(device_)) kernel(); }, false});
  }
}

bool Stream::idle() {
  check(device_);
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !running_;
}

void Stream::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

// A mark is passed and a wait is waited for even on a lost device, so that nobody waits for ever.
void Stream::run() {
  const bool first = this == &stream(device_, kDefaultStream);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !tasks_.empty() || closing; });
    if (tasks_.empty()) {
      return;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    running_ = true;
    lock.unlock();
    if (task.kernel && !closing && !lost(device_)) {
      while (first && knobs().held && !closing && !lost(device_)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      if (int64_t delay = knobs().delay_us; delay > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      try {
        task.run();
      } catch (const c10::Error& error) {
        lose(device_, task.name, error.what_without_backtrace());
      } catch (const std::exception& error) {
        lose(device_, task.name, error.what());
      }
    } else if (!task.kernel) {
      task.run();
    }
    // What it holds is let go of before anyone is told that it has run.
    task = {};
    lock.lock();
    running_ = false;
  }
}

int device_count() {
  return static_cast<int>(knobs().visible.size());
}

void check_index(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "simulated error: invalid device ordinal: this process has ", device_count(), " devices, got ", device);
}

Stream& stream(int device, int64_t number) {
  check_index(device);
  auto& streams = devices()[device]->streams;
  TORCH_CHECK(
      number >= 0 && number < static_cast<int64_t>(streams.size()),
      "simulated:", device, " has no stream ", number);
  return *streams[number];
}

int64_t take_stream(int device, int priority) {
  check_index(device);
  check(device);
  // As for CUDA, negative priorities come first. Here both kinds run alike.
  int kind = priority < 0 ? 1 : 0;
  return 1 + kind * kPool + devices()[device]->taken[kind]++ % kPool;
}

bool in_use(int device) {
  return device >= 0 && device < device_count() && devices()[device]->used;
}

static thread_local int this_device = 0;
static thread_local std::vector<int64_t> this_streams;

int current_device() {
  return this_device;
}

void set_current_device(int device) {
  check_index(device);
  this_device = device;
}

int64_t current_stream_number(int device) {
  check_index(device);
  this_streams.resize(device_count(), kDefaultStream);
  return this_streams[device];
}

void set_current_stream_number(int device, int64_t number) {
  check_index(device);
  this_streams.resize(device_count(), kDefaultStream);
  this_streams[device] = number;
}

Stream& current_stream(int device) {
  return stream(device, current_stream_number(device));
}

void host_wait(int device, Mark& mark, std::atomic<int64_t>& counted) {
  check(device);
  counted++;
  mark.wait();
  check(device);
}

void synchronize(Stream& stream, std::atomic<int64_t>& counted) {
  host_wait(stream.device(), *stream.mark(), counted);
}

void synchronize_device(int device) {
  check_index(device);
  check(device);
  counts().devices++;
  if (!devices()[device]->used) {
    return;
  }
  std::vector<MarkPtr> marks;
  for (auto& stream : devices()[device]->streams) {
    if (!stream->idle()) {
      marks.push_back(stream->mark());
    }
  }
  for (auto& mark : marks) {
    mark->wait();
  }
  check(device);
}

// ---- a lost device --------------------------------------------------------------------------------------

bool lost(int device) {
  return devices()[device]->lost;
}

// cudaErrorAssert
constexpr int32_t kAssert = 710;

void check(int device) {
  if (lost(device)) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        kAssert,
        "simulated error: device-side assert triggered\n"
        "A kernel fails later than it was launched, so this call need not be the one at fault.\n"
        "For debugging consider passing SIMULATED_LAUNCH_BLOCKING=1\n");
  }
}

} // namespace simulated
