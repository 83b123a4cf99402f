//! Gives memory over to a userfaultfd of the program's own.
//!
//! A mapping belongs to one userfaultfd, and paged memory to the pager's. When the program
//! registers such memory itself, the kernel says EBUSY. The memory is then replaced by a copy that
//! is not registered, and the program's request is made again. The pager hears that the old mapping
//! has gone, and leaves the new one alone. Pages of zeros are left out, so that the program's
//! userfaultfd sees faults where the memory was never used; whether it was used cannot be told of
//! such a page.

use super::outcome::as_status;
use crate::own::{self, LEFT_ALONE, PAGE};
use crate::turn::{Act, Alone};
use crate::{maps, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::abi::UFFDIO_REGISTER;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_ulong};

/// How often a copy is made: the pager may have found and registered one before it was noted.
const TRIES: usize = 3;

/// Replaces libc's, which makes the same system call for each request.
pub(super) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    let call = || {
        // SAFETY: the caller's promises are those of ioctl.
        unsafe { syscall(libc::SYS_ioctl, [fd as usize, request as usize, argument, 0, 0, 0]) }
    };
    let mut outcome = call();
    for _ in 0..TRIES {
        if request != UFFDIO_REGISTER || outcome != Err(Errno(libc::EBUSY)) || !own::is_paged() {
            break;
        }
        // SAFETY: the kernel has read the request's structure, which begins with a range.
        let range = unsafe { (argument as *const Range).read_unaligned() };
        if let Err(errno) = give_over(range) {
            outcome = Err(errno);
            break;
        }
        outcome = call();
    }
    match outcome {
        Ok(value) => value as c_int,
        Err(errno) => as_status(Err(errno)),
    }
}

/// Replaces all private memory in `range` by copies that are not registered.
fn give_over(range: Range) -> Result<(), Errno> {
    let mappings = maps::open()?;
    let mut outcome = Ok(());
    let listed = maps::for_each_readable_anonymous(mappings, own::range(), |mapping| {
        let start = mapping.range.start.max(range.start);
        let end = (mapping.range.start + mapping.range.len).min(range.start + range.len);
        if start < end && outcome.is_ok() {
            outcome = replace(Range { start, len: end - start }, mapping.is_writable);
        }
    });
    sys::close(mappings);
    listed.and(outcome)
}

fn replace(range: Range, is_writable: bool) -> Result<(), Errno> {
    let len = range.len as usize;
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let copy = sys::map_anonymous(len, writable, libc::MAP_NORESERVE)?;
    let noted = Range { start: copy as u64, len: range.len };
    LEFT_ALONE.note(noted);
    for at in (0..len).step_by(PAGE) {
        // SAFETY: both are mappings of this length, and can be read; the second is this function's.
        unsafe { copy_if_used((range.start as usize + at) as *const u64, (copy + at) as *mut u64) };
    }
    // SAFETY: the new mapping has the contents of the old one, whose place it takes.
    let moved = unsafe {
        let protected = if is_writable { Ok(()) } else { sys::protect(copy, len, libc::PROT_READ) };
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
        let moved = protected.and_then(|()| {
            let _turn = Alone::new(Act::Replace)?;
            syscall(libc::SYS_mremap, [copy, len, len, flags, range.start as usize, 0])
        });
        moved.inspect_err(|_| sys::unmap(copy, len))
    };
    LEFT_ALONE.forget(noted);
    moved?;
    LEFT_ALONE.note(range);
    Ok(())
}

/// Copies a page, unless it is all zeros, as the copy is.
///
/// # Safety
/// Both must be pages, the second writable and nobody else's.
unsafe fn copy_if_used(from: *const u64, to: *mut u64) {
    const WORDS: usize = PAGE / size_of::<u64>();
    // SAFETY: the caller's promise. Another thread of the program may write to the first meanwhile.
    unsafe {
        if (0..WORDS).any(|word| from.add(word).read_volatile() != 0) {
            to.copy_from_nonoverlapping(from, WORDS);
        }
    }
}
