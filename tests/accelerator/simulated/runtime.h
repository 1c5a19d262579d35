// A device in software: streams that are threads, marks in them, and memory that is handed on in stream order.
//
// Nothing here knows tensors. The rules are CUDA's as a program sees them: a stream runs what it was given in
// order and later, other streams run beside it, and a kernel that fails costs the whole device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

using Clock = std::chrono::steady_clock;

// ---- knobs, from the environment ------------------------------------------------------------------------

struct Knobs {
  // So many devices does the machine have.
  int devices;
  // These of them does this process see; tensors call them 0, 1, ...
  std::vector<int> visible;
  // Each kernel takes at least so long. Python may change it while the device runs.
  std::atomic<int64_t> delay_us;
  // Freed and fresh memory is filled with bytes that no computation leaves there.
  bool scribble;
  // So many bytes does each device have.
  size_t memory;
  // Each launch waits for its kernel, so that a failure is raised where it was caused.
  bool blocking;
  // No kernel of a default stream begins meanwhile. Python may change it while the device runs.
  std::atomic<bool> held{false};
};

Knobs& knobs();

// ---- what tests count -----------------------------------------------------------------------------------

struct Counts {
  // The host has waited so often for an event, a stream, a device, a copy, or the size of a result.
  std::atomic<int64_t> events{0}, streams{0}, devices{0}, copies{0}, sizes{0};
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> allocations{0};
};

Counts& counts();

// ---- streams --------------------------------------------------------------------------------------------

// A place in a stream. It is passed when everything that came before it has run.
class Mark {
 public:
  void pass();
  bool passed();
  void wait();
  // The time when it was passed.
  Clock::time_point when() const { return when_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point when_;
};

using MarkPtr = std::shared_ptr<Mark>;

// An in-order queue with a thread, which begins with the first use.
class Stream {
 public:
  explicit Stream(int device) : device_(device) {}
  int device() const { return device_; }
  // All of these raise `torch.AcceleratorError` once the device is lost.
  void launch(std::string name, std::function<void()> kernel);
  MarkPtr mark();
  void wait_for(MarkPtr mark);
  bool idle();
  // A kernel that is not counted, has no delay and never raises: for a destructor.
  void quietly(std::function<void()> kernel);
  // Let the process end: kernels that have not begun are dropped.
  void close();

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    bool kernel;
  };
  void push(Task task);
  void run();

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  std::thread thread_;
};

int device_count();
// Raise if this process has no device of this number.
void check_index(int device);

// Stream 0 is the default stream of its device. Others are taken from a pool, in turns.
constexpr int64_t kDefaultStream = 0;
Stream& stream(int device, int64_t number);
int64_t take_stream(int device, int priority);
bool in_use(int device);

// This thread's.
int current_device();
void set_current_device(int device);
int64_t current_stream_number(int device);
void set_current_stream_number(int device, int64_t number);
Stream& current_stream(int device);

// The host waits: each raises what the device has met meanwhile, and is counted in one of `counts()`.
void host_wait(int device, Mark& mark, std::atomic<int64_t>& counted);
void synchronize(Stream& stream, std::atomic<int64_t>& counted);
void synchronize_device(int device);

// ---- a lost device --------------------------------------------------------------------------------------

bool lost(int device);
// Raise `torch.AcceleratorError` if the device is lost. It stays so until the process ends.
void check(int device);

// A process that was forked after its parent had used the device cannot use it: the threads are not there.
bool in_bad_fork();

} // namespace simulated
