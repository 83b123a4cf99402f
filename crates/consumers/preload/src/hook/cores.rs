//! Keeps paged memory out of core files although the program wants it there.

use crate::own::PAGE;
use crate::turn::{Act, Alone};
use crate::withhold;
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;

/// MADV_DODUMP for libc's `madvise` and `syscall`: false zeros must not get into core files.
pub(super) fn let_cores_have(start: usize, len: usize) -> Result<(), Errno> {
    if !start.is_multiple_of(PAGE) || len.checked_next_multiple_of(PAGE).is_none() {
        return Err(Errno(libc::EINVAL));
    }
    let _turn = Alone::new(Act::Other)?;
    withhold::let_cores_have(Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 })
}
