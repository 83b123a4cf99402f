//! Defines the messages between launcher and library in a bare program.
//!
//! A *bare* program is statically linked or linked with musl, so that glibc's dynamic linker does
//! not load the library into it. The launcher starts the program stopped, maps the library
//! into it, and calls [`ENTER`] with a [`Place`]. Both ends are of one version: the launcher reads
//! the library from a file of its own installation.

use crate::handover::Range;

/// The library's function that the launcher calls: `extern "C" fn(*mut Place) -> i32`, 0 if the
/// program is attached. It reports a failure on standard error.
pub const ENTER: &str = "hecaton_enter";

/// The library's function that replaces every function of glibc, which a bare program lacks.
/// Reports the call on standard error and ends the program.
pub const MISSING: &str = "hecaton_missing";

/// Longest socket path in bytes, with its terminating zero.
pub const MAX_PATH: usize = 108;

/// Bytes that the launcher reserves behind the library for the library's own memory.
pub const OWN_ROOM: u64 = 4 << 20;

/// The library's addresses and its pager's socket.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The library, and reserved memory behind it.
    pub reserved: Range,
    /// Address of [`OWN_ROOM`] bytes for the library's own use, within `reserved`.
    pub room: u64,
    /// Path of the pager's socket, padded with zeros.
    pub socket: [u8; MAX_PATH],
    /// Padding.
    pub unused: u32,
    /// Address of the library's code for the system call `clone` without CLONE_VM; the library
    /// fills it in. The code returns to the address in r11.
    pub follow_clone: u64,
    /// The same for the system call `fork`.
    pub follow_fork: u64,
}

const _: () = assert!(size_of::<Place>() == 16 + 8 + MAX_PATH + 4 + 16);

impl Place {
    /// The bytes to write into the program.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// Parses the bytes that the library has changed.
    pub fn from_bytes(bytes: &[u8; size_of::<Place>()]) -> Place {
        // SAFETY: any bytes are a valid Place.
        unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) }
    }
}
