//! Replaces machine code of libc's by jumps to other functions.

use crate::own::PAGE;
use crate::sys;
use hecaton_uffd::Errno;
use libc::c_void;

pub(super) fn jump_to(target: usize) -> [u8; 14] {
    // jmp [rip + 0]; the address
    let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    code[6..].copy_from_slice(&target.to_le_bytes());
    code
}

/// # Safety
/// `function` is null or the start of a function of at least 14 bytes with `target`'s signature,
/// and no thread is running its first instructions: the program has only this thread yet.
pub(super) unsafe fn replace(function: *mut c_void, target: *const ()) {
    if !function.is_null() {
        // SAFETY: the caller's promise. If the text cannot be written, the function stays as it is.
        let _ = unsafe { write_code(function as usize, &jump_to(target as usize)) };
    }
}

/// # Safety
/// `at` is within text, and its bytes may be replaced at this moment.
pub(super) unsafe fn write_code(at: usize, code: &[u8]) -> Result<(), Errno> {
    let first = at & !(PAGE - 1);
    let end = (at + code.len()).next_multiple_of(PAGE);
    let text = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the pages stay readable and executable throughout, for other functions on them. A
    // private file mapping is copied when written, so no other process sees it.
    unsafe {
        sys::protect(first, end - first, text | libc::PROT_WRITE)?;
        std::ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, code.len());
        sys::protect(first, end - first, text)
    }
}
