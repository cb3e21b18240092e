// The modes of the linear family.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace driver {

// What is wrong with one case, a line each; nothing where all is right. Each of `isas` has kernels of its own.
std::vector<std::string> check_recurrence(uint64_t seed, const std::vector<std::string>& isas);
std::vector<std::string> check_beside(uint64_t seed, const std::vector<std::string>& isas);

// That long calls stop when they are told to; what is wrong, or nothing.
std::string interrupted_linear_calls();

}  // namespace driver
