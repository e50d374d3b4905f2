// Threads that stay awake between products that follow each other closely.
//
// Waking a thread takes longer than a small product, and XLA's own threads sleep as soon as they have
// nothing to do. These look out for the next task for a moment before they sleep.

#ifndef HAIKU_IMPLICIT_KERNELS_THREADS_H_
#define HAIKU_IMPLICIT_KERNELS_THREADS_H_

#include <pthread.h>

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

  // While it lives, its thread is busy: XLA computes products that don't need each other at the same
  // time, and for each of its threads, one of these rests.
  class Busy {
   public:
    Busy() { ++get().busy_; }
    ~Busy() {
      --get().busy_;
      get().wake_for(true);
    }
  };

  // Runs `task(i)` for all i < tasks, here and on others that have nothing to do. Those that sleep are
  // only woken if `wake`.
  void run(int64_t tasks, const Task& task, bool wake) {
    Call* const call = tasks < 2 || alone_ || !wake && asleep_ == count() - 1 ? nullptr : unused();
    if (!call) {
      for (int64_t i = 0; i < tasks; ++i) task(i);
      return;
    }
    const uint64_t before = call->next >> 32;
    call->next = before << 32 | kIndex;  // nothing is taken while the call is written down
    call->task = &task, call->count = static_cast<uint32_t>(tasks), call->done = 0, call->wake = wake;
    call->next = before + 1 << 32;
    wake_for(wake);
    while (call->take()) {
    }
    wait(kAwake, [&] { return call->done == tasks; });
    while (call->done < tasks) std::this_thread::yield();
    call->used = false;
  }

 private:
  static constexpr uint64_t kIndex = UINT32_MAX;
  static constexpr std::chrono::microseconds kAwake{200};
  static constexpr int kCalls = 8;  // at the same time; further ones run on their threads alone

  struct alignas(64) Call {
    std::atomic<bool> used{false}, wake{false};
    std::atomic<uint64_t> next{0};  // the number of the call, and in the low half that of its next task
    std::atomic<int64_t> done{0};
    std::atomic<uint32_t> count{0};
    std::atomic<const Task*> task{nullptr};

    bool open() const { return (next & kIndex) < count; }

    // Runs a task, if there is one left. The call does not end before it, and it is not taken if another
    // call came after what was read of this one.
    bool take() {
      for (uint64_t now = next; (now & kIndex) < count;) {
        const Task* const of_call = task;
        if (!next.compare_exchange_weak(now, now + 1)) continue;
        (*of_call)(now & kIndex);
        ++done;
        return true;
      }
      return false;
    }
  };

  Threads() {
    // A process that `fork` makes has only the thread that called it, and locks as they were.
    pthread_atfork(nullptr, nullptr, [] { alone_ = true; });
    for (int64_t i = 1; i < count(); ++i)
      std::thread([this, i] { serve(i); }).detach();
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  Call* unused() {
    for (Call& call : calls_)
      if (!call.used && !call.used.exchange(true)) return &call;
    return nullptr;
  }

  // Whether thread `i` of these has a core.
  bool may_run(int64_t i) const { return i + busy_ <= count(); }

  bool any_open() const {
    return std::any_of(calls_, calls_ + kCalls, [](const Call& call) { return call.open(); });
  }

  // Wakes threads that sleep, if one of them may run and there are tasks that they are woken for.
  void wake_for(bool wake) {
    if (!wake || alone_ || !asleep_ || !may_run(1)) return;
    if (std::none_of(calls_, calls_ + kCalls, [](const Call& c) { return c.wake && c.open(); })) return;
    const std::lock_guard<std::mutex> hold(sleep_);
    wake_.notify_all();
  }

  // Serves calls for ever.
  void serve(int64_t i) {
    const auto work = [&] { return may_run(i) && any_open(); };
    const auto work_soon = [&] {
      if (!may_run(i)) std::this_thread::yield();
      return work();
    };
    for (;;) {
      for (Call& call : calls_)
        while (may_run(i) && call.take()) {
        }
      if (wait(kAwake, work_soon)) continue;
      std::unique_lock<std::mutex> hold(sleep_);
      ++asleep_;
      wake_.wait(hold, work);
      --asleep_;
    }
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

  Call calls_[kCalls];
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int64_t> asleep_{0}, busy_{0};
  inline static bool alone_ = false;
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

  // Runs `task(first, last)` for parts of up to `size` (a multiple of `unit`) of `n`: at least two for each
  // thread, of a size for which none of them waits long for others.
  template <typename Function>
  void parts(int64_t n, int64_t unit, int64_t size, const Function& function) const {
    while (size > unit && n < 2 * threads * size) size -= unit;
    const auto time = [&](int64_t size) { return (n + threads * size - 1) / (threads * size) * size; };
    int64_t best = size;
    for (int64_t less = size - unit; threads > 1 && less >= size / 2 && less > 0; less -= unit)
      if (time(less) < time(best)) best = less;
    each((n + best - 1) / best, [&](int64_t i) { function(i * best, std::min(n, (i + 1) * best)); });
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
  const haiku_implicit::Threads::Busy busy;
  Team of_one = worthwhile(threads, products), of_all{1};
  if (apart && !of_one.wake && batch >= 4 * of_one.threads) {
    of_one = {1};
    of_all = worthwhile(threads, batch * products);
  }
  of_all.each(batch, [&](int64_t b) { function(b, of_one); });
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_THREADS_H_
