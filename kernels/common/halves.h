// What kernels of halves tell each other about a row.
#pragma once

constexpr int kNotFinite = 1 << 20;  // exponent of a row of weights with an infinity or NaN
