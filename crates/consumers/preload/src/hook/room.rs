//! Refuses mappings that are larger than memory, swap and pool together.
//!
//! The kernel charges a private mapping to the host when it is made, and by its heuristic
//! (`vm.overcommit_memory` 0) refuses one that is larger than memory and swap together. A mapping
//! that is paged may be larger, so it is made with MAP_NORESERVE, which charges nothing. The
//! launcher says what the limit is in its place: memory, swap and pool.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// In bytes.
#[unsafe(link_section = ".data")]
static LARGEST: AtomicU64 = AtomicU64::new(u64::MAX);

/// Takes the limit that the launcher gave; what is no number limits nothing.
pub(crate) fn limit(largest: Option<&CStr>) {
    let bytes = largest.and_then(|text| text.to_str().ok()?.parse().ok());
    LARGEST.store(bytes.unwrap_or(u64::MAX), Relaxed);
}

/// Whether no mapping may have this length, in bytes.
pub(crate) fn is_too_large(len: usize) -> bool {
    len as u64 > LARGEST.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_of_the_limit_is_let_pass() {
        assert!(!is_too_large(usize::MAX));
        limit(Some(c"4096"));
        assert!(!is_too_large(4096) && is_too_large(4097));
        limit(Some(c"much"));
        assert!(!is_too_large(usize::MAX));
        limit(Some(c"1"));
        limit(None);
        assert!(!is_too_large(usize::MAX));
    }
}
