#pragma once

#include <optional>

#include <ATen/core/Generator.h>

namespace simulated {

// The seed of what one launch draws, from the generator that was given, or from the device's own.
uint64_t draw(const std::optional<at::Generator>& given, int device);

} // namespace simulated
