// The device's memory and the host's pinned memory: both are kept when they are freed, and handed on again.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace simulated {

c10::DeviceAllocator* device_allocator();
at::HostAllocator* pinned_allocator();

// The device that memory at this address belongs to, or -1.
int device_of(const void* address);
bool is_pinned(const void* address);
// The block of pinned memory that `address` is in is not used again before what is now in the stream has run.
void used_pinned(const void* address, int device, int64_t stream);

} // namespace simulated
