//! Reads the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds of Unix time; 0 while the clock is before 1970.
pub fn unix_time_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
