// An allocator for torch's CPU tensors that counts bytes and may have a limit, as the allocator of a GPU does.
//
// torch asks this allocator for the memory of each CPU tensor and of the workspaces of oneDNN.

#include <atomic>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

namespace {

std::atomic<long> now{0}, most{0}, limit{0};

void give_back(void* data) {
  if (data == nullptr) return;
  now -= static_cast<long>(malloc_usable_size(data));
  c10::free_cpu(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(
        OutOfMemoryError, limit == 0 || now + static_cast<long>(bytes) <= limit, "the limit of ", limit.load(),
        " bytes does not allow ", bytes, " bytes beside ", now.load());
    void* data = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    if (data != nullptr) {
      const long held = now += static_cast<long>(malloc_usable_size(data));
      for (long before = most; before < held && !most.compare_exchange_weak(before, held);) {
      }
    }
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void install() { c10::SetCPUAllocator(&allocator, 255); }
long bytes_now() { return now; }
long bytes_most() { return most; }
void forget_most() { most = now.load(); }
void set_limit(long bytes) { limit = bytes; }
}
