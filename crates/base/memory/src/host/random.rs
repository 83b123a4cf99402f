//! Numbers that nobody guesses, and that nobody else draws but for one chance in 2^64: for what is
//! named without asking anybody.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// The next one.
///
/// # Panics
/// If the kernel gives none: a filter that forbids the call is the one case.
pub fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            // So few come whole.
            Ok(8) => return u64::from_ne_bytes(bytes),
            // While the host boots, they are waited for.
            Err(Errno::INTR) => {}
            other => panic!("the kernel has no random numbers: {other:?}"),
        }
    }
}
