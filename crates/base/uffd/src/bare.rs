//! Defines what the launcher and the library tell each other in a bare program.
//!
//! A *bare* program is one that no dynamic linker of glibc loads the library into, because it is
//! statically linked or linked with musl. The launcher starts the program stopped, maps the library
//! into it, and calls [`ENTER`] with a [`Place`]. Both ends are of one version: the launcher reads
//! the library from a file of its own installation.

use crate::handover::Range;

/// The library's function that the launcher calls: `extern "C" fn(*mut Place) -> i32`, 0 if the
/// program is attached. It has told of a failure on standard error.
pub const ENTER: &str = "hecaton_enter";

/// The library's function in the place of every function of libc's, which a bare program lacks.
/// Tells of the mistake and ends the program.
pub const MISSING: &str = "hecaton_missing";

/// Most bytes of a socket's path, with the zero at its end.
pub const MAX_PATH: usize = 108;

/// Bytes that the launcher reserves behind the library for the library's own memory.
pub const OWN_ROOM: u64 = 4 << 20;

/// Where the library is, and what it is to know.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The library and the room behind it: inaccessible where the library is not.
    pub reserved: Range,
    /// Where in it the room of [`OWN_ROOM`] bytes begins.
    pub room: u64,
    /// The pager's socket, zeros behind it.
    pub socket: [u8; MAX_PATH],
    /// Alignment.
    pub unused: u32,
    /// Filled in by the library: where the code goes on that has come to make the system call
    /// `clone`, for a child with a copy of the memory. Returns to the address in r11.
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

    /// What the library has made of it.
    pub fn from_bytes(bytes: &[u8; size_of::<Place>()]) -> Place {
        // SAFETY: any bytes are a valid Place.
        unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) }
    }
}
