//! See [`check`].

#![no_main]

#[path = "../checks/nbd.rs"]
mod check;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check::check(bytes);
});
