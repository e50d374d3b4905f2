// Threads that stay awake between products that follow each other closely.
//
// Waking a thread takes longer than a small product, and XLA's own threads sleep as soon as they have
// nothing to do. These look out for the next task for a moment before they sleep.

#ifndef HAIKU_IMPLICIT_KERNELS_THREADS_H_
#define HAIKU_IMPLICIT_KERNELS_THREADS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

namespace haiku_implicit {

// A function of an index, which is compiled once and called through a pointer.
class Task {
 public:
  template <typename Function>
  Task(const Function& function)
      : call_([](const void* of, int64_t i) { (*static_cast<const Function*>(of))(i); }),
        of_(&function) {}

  void operator()(int64_t i) const { call_(of_, i); }

 private:
  void (*call_)(const void*, int64_t);
  const void* of_;
};

// (Hidden: libraries of other versions in this process have their own.)
class __attribute__((visibility("hidden"))) Threads {
 public:
  // Those of this process. They end with it, so that this is never destroyed.
  static Threads& get() {
    static Threads* threads = new Threads;
    return *threads;
  }

  // How many run at the same time, this one among them. (Asked for once: the answer is in a file.)
  static int64_t count() {
    static const int64_t found = std::max(1u, std::thread::hardware_concurrency());
    return found;
  }

  // Runs `task(i)` for all i < count, here and on others. If they serve another call, or all sleep and
  // are not to be woken for it, here alone.
  void run(int64_t tasks, const Task& task, bool wake) {
    const std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine || tasks < 2 || !wake && asleep_ == count() - 1) {
      for (int64_t i = 0; i < tasks; ++i) task(i);
      return;
    }
    const uint64_t before = next_ >> 32;
    next_ = before << 32 | kIndex;  // nothing is taken while the call is written down
    task_ = &task, count_ = static_cast<uint32_t>(tasks), done_ = 0;
    next_ = before + 1 << 32;
    if (wake && asleep_) {
      const std::lock_guard<std::mutex> hold(sleep_);
      wake_.notify_all();
    }
    take();
    wait(kAwake, [&] { return done_ == tasks; });
    while (done_ < tasks) std::this_thread::yield();
  }

 private:
  Threads() {
    for (int64_t i = 1; i < count(); ++i)
      std::thread([this] { serve(); }).detach();
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  // Takes tasks of the present call until there are no more. A call does not end before the tasks
  // that were taken, and none is taken if another call came after what was read of this one.
  void take() {
    for (uint64_t next = next_; (next & kIndex) < count_;) {
      const Task* const task = task_;
      if (!next_.compare_exchange_weak(next, next + 1)) continue;
      (*task)(next & kIndex);
      ++done_;
      next = next_;
    }
  }

  // Serves calls for ever.
  void serve() {
    for (uint64_t seen = 0;;) {
      await(seen);
      seen = next_ >> 32;
      take();
    }
  }

  // Returns when there is another call than `seen`.
  void await(uint64_t seen) {
    const auto another = [&] { return next_ >> 32 != seen; };
    if (wait(kAwake, another)) return;
    std::unique_lock<std::mutex> hold(sleep_);
    ++asleep_;
    wake_.wait(hold, another);
    --asleep_;
  }

  // Whether a condition became true in some time, in which others may run.
  template <typename Condition>
  static bool wait(std::chrono::microseconds time, const Condition& condition) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 256; ++i, pause())
        if (condition()) return true;
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() - start < time);
    return false;
  }

  static constexpr uint64_t kIndex = UINT32_MAX;
  static constexpr std::chrono::microseconds kAwake{200};

  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
  std::atomic<uint64_t> next_{0};  // the number of the call, and in the low half that of its next task
  std::atomic<int64_t> done_{0};
  std::atomic<uint32_t> count_{0};
  std::atomic<const Task*> task_{nullptr};
};

}  // namespace haiku_implicit

namespace {

// Memory of this thread, which later calls use again; another one for each `of`.
template <int of = 0>
__attribute__((noinline)) float* scratch(size_t size) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local size_t available = 0;
  if (size > available) {
    available = (size + 15) / 16 * 16;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, available * sizeof(float))));
  }
  return memory.get();
}

// So many threads, this one among them. If the others sleep, they are only woken for what takes long.
struct Team {
  int64_t threads;
  bool wake;

  // Runs `task(i)` for all i < count.
  void each(int64_t count, const haiku_implicit::Task& task) const {
    if (threads > 1) return haiku_implicit::Threads::get().run(count, task, wake);
    for (int64_t i = 0; i < count; ++i) task(i);
  }

  // Runs `task(first, last)` for parts of `size` (a multiple of `unit`) of `n`, at least two for each.
  template <typename Function>
  void parts(int64_t n, int64_t unit, int64_t size, const Function& function) const {
    while (size > unit && n < 2 * threads * size) size -= unit;
    each((n + size - 1) / size,
         [&](int64_t i) { function(i * size, std::min(n, (i + 1) * size)); });
  }
};

// As many threads as XLA's pool allows for so many products: each has to have some, and waking them takes
// as long as more of these.
constexpr int64_t kWorth = 1 << 14, kWorthWaking = 1 << 17;
inline Team worthwhile(int64_t threads, int64_t products) {
  threads = std::min({threads, haiku_implicit::Threads::count(), 1 + products / kWorth});
  return {threads, products >= kWorthWaking};
}

// Runs `function(b, team)` for a batch of matrices, of so many products each. Threads share a matrix or,
// if there are many small ones, and these may be `apart`, the batch.
template <typename Function>
void over_batch(int64_t batch, int64_t products, int64_t threads, bool apart, const Function& function) {
  Team of_one = worthwhile(threads, products), of_all{1};
  if (apart && !of_one.wake && batch >= 4 * of_one.threads) {
    of_one = {1};
    of_all = worthwhile(threads, batch * products);
  }
  of_all.each(batch, [&](int64_t b) { function(b, of_one); });
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_THREADS_H_
