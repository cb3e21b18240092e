// Activations and their derivatives, in double.
#pragma once

#include <cmath>

namespace driver {

inline double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }
inline double sigmoid_slope_of(double x) { return sigmoid_of(x) * sigmoid_of(-x); }
inline double silu_of(double x) { return x * sigmoid_of(x); }
inline double silu_slope_of(double x) { return sigmoid_of(x) * (1 + x * sigmoid_of(-x)); }

}  // namespace driver
