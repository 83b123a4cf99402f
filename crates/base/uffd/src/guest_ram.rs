//! How `libhecaton.so` in a hypervisor hands guest RAM to the pager.
//!
//! On the same socket as programs ([`crate::handover`]), but another first word. One connection a
//! hypervisor: each region of guest RAM is one [`Handover`], answered by one [`Answer`] before the
//! hypervisor's `mmap` returns. With the first comes the userfaultfd, with each the memory file, by
//! `SCM_RIGHTS`, in this order. After the last the connection stays open, for memory that is
//! plugged later. A region that was handed over already, said again on the same connection, is
//! answered like the first time: the pager may have been killed between acting and answering.

use crate::handover::Range;
use std::mem::size_of;

/// First word of [`Handover`] and [`Answer`]: the protocol and its version.
pub const MAGIC: u32 = 0x4845_4752;

/// The environment variable that names the pager's socket to a hypervisor.
pub const SOCKET_VARIABLE: &str = "HECATON_GUEST_RAM";

/// Smaller mappings are no guest RAM.
pub const MIN_BYTES: u64 = 1 << 20;

/// Names of memory files that hold guest RAM: QEMU's own `memory-backend-memfd`, and files that
/// were made for the purpose, whose names begin so.
pub const FILE_NAMES: [&str; 2] = ["memory-backend-memfd", "hecaton-ram"];

/// Longest reason in an [`Answer`], in bytes.
pub const MAX_REASON: usize = 240;

/// A region of guest RAM.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handover {
    /// [`MAGIC`].
    pub magic: u32,
    /// 1: the userfaultfd comes along, before the memory file. 0: this is a further region.
    pub first: u32,
    /// Where the hypervisor has it; registered for missing pages and write protection.
    pub region: Range,
    /// Where it begins in the memory file, in bytes.
    pub offset: u64,
}

/// The pager's answer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// [`MAGIC`].
    pub magic: u32,
    /// 0: the region is paged from now on. 1: it is refused. 2: see [`Answer::DETACHED`].
    pub refused: u32,
    /// Bytes used of `reason`.
    pub reason_len: u64,
    /// Why it is refused, for people, in UTF-8.
    pub reason: [u8; MAX_REASON],
}

impl Answer {
    /// The region is paged.
    pub const ACCEPTED: Answer =
        Answer { magic: MAGIC, refused: 0, reason_len: 0, reason: [0; MAX_REASON] };

    /// Said unasked, as the last word: the hypervisor's memory is not paged any more, nor is what
    /// it maps from now on.
    pub const DETACHED: Answer = Answer { refused: 2, ..Answer::ACCEPTED };

    /// The region is not paged, and must not be used as if it were. A long reason is cut.
    pub fn refusal(reason: &str) -> Answer {
        let mut end = reason.len().min(MAX_REASON);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut answer = Answer { refused: 1, reason_len: end as u64, ..Answer::ACCEPTED };
        answer.reason[..end].copy_from_slice(&reason.as_bytes()[..end]);
        answer
    }

    /// The reason's bytes; whatever length was claimed, within the structure.
    pub fn reason(&self) -> &[u8] {
        &self.reason[..(self.reason_len as usize).min(MAX_REASON)]
    }
}

macro_rules! plain_bytes {
    ($name:ident) => {
        impl $name {
            /// The bytes to send.
            pub fn as_bytes(&self) -> &[u8] {
                // SAFETY: a `repr(C)` structure of integers without padding.
                unsafe {
                    std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<$name>())
                }
            }

            /// The structure, if there are as many bytes as it has and they begin as it does.
            pub fn parse(bytes: &[u8]) -> Option<$name> {
                if bytes.len() != size_of::<$name>() {
                    return None;
                }
                // SAFETY: the length was compared, and any bytes are a valid value.
                let parsed = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<$name>()) };
                (parsed.magic == MAGIC).then_some(parsed)
            }
        }
    };
}

plain_bytes!(Handover);
plain_bytes!(Answer);

const _: () = assert!(size_of::<Handover>() == 32);
const _: () = assert!(size_of::<Answer>() == 16 + MAX_REASON);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_and_not_otherwise() {
        let range = Range { start: 0x7f00_0000_0000, len: 1 << 30 };
        let sent = Handover { magic: MAGIC, first: 1, region: range, offset: 4096 };
        assert_eq!(Handover::parse(sent.as_bytes()), Some(sent));
        assert_eq!(Handover::parse(&sent.as_bytes()[..31]), None);
        assert_eq!(Handover::parse(&[0; 32]), None);
        assert!(Answer::parse(sent.as_bytes()).is_none());
    }

    #[test]
    fn a_reason_is_cut_between_characters() {
        let long = "ä".repeat(MAX_REASON);
        let answer = Answer::refusal(&format!("x{long}"));
        assert_eq!(answer.reason().len(), MAX_REASON - 1);
        assert!(std::str::from_utf8(answer.reason()).is_ok());
        let mut wild = answer;
        wild.reason_len = u64::MAX;
        assert_eq!(wild.reason().len(), MAX_REASON);
        assert_eq!(Answer::parse(answer.as_bytes()).unwrap().reason(), answer.reason());
    }
}
