//! Defines the messages about shared memory: of `libhecaton.so` to the keeper, which opens files.
//!
//! Each question has a `SOCK_SEQPACKET` connection of its own. The program sends an [`Ask`]. The
//! keeper sends an [`Answer`], with the open file as a descriptor. Both are plain structures in the
//! machine's byte order, as in [`crate::handover`].

use crate::handover::MAGIC;

/// The path of the keeper's socket is that of the pager's socket with this suffix.
pub const SOCKET_SUFFIX: &str = ".files";

/// The UUID of the file systems that the files are on.
pub const FILE_SYSTEM_UUID: [u8; 16] = *b"HECATON\0\x80\0Shared";

/// The number of these file systems (`f_fsid`) as `fstatfs` tells it: ext4 makes it of the UUID.
pub const FILE_SYSTEM_ID: u64 = {
    let [a, b, c, d, e, f, g, h, rest @ ..] = FILE_SYSTEM_UUID;
    u64::from_le_bytes([a, b, c, d, e, f, g, h]) ^ u64::from_le_bytes(rest)
};

/// Longest name in a question, in bytes.
pub const MAX_NAME: usize = 240;

/// The kinds of questions.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskKind {
    /// Make a file of [`Ask::bytes`] bytes, without a name, for a shared mapping.
    Anonymous = 1,
    /// Make an empty file without a name, as `memfd_create` does.
    MemoryFile = 2,
    /// Open the file with this name as `shm_open` does, with [`Ask::flags`] and [`Ask::mode`].
    Open = 3,
    /// Remove this name, as `shm_unlink` does.
    Unlink = 4,
}

/// A question to the keeper.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    magic: u32,
    kind: u32,
    /// Flags of [`AskKind::Open`], as for `open`.
    pub flags: u32,
    /// Permissions of a file that [`AskKind::Open`] makes, as for `open`.
    pub mode: u32,
    /// Length of an anonymous file, in bytes.
    pub bytes: u64,
    name_len: u64,
    name: [u8; MAX_NAME],
}

impl Ask {
    /// A question with this name, and without flags, mode and size. `None` if the name is longer
    /// than [`MAX_NAME`].
    pub fn new(kind: AskKind, name: &[u8]) -> Option<Ask> {
        let mut stored = [0; MAX_NAME];
        stored.get_mut(..name.len())?.copy_from_slice(name);
        let (kind, name_len) = (kind as u32, name.len() as u64);
        Some(Ask { magic: MAGIC, kind, flags: 0, mode: 0, bytes: 0, name_len, name: stored })
    }

    /// Decodes a question; `None` if the bytes are none.
    pub fn parse(bytes: &[u8]) -> Option<Ask> {
        if bytes.len() != size_of::<Ask>() {
            return None;
        }
        // SAFETY: the length was compared, and any bytes are a valid Ask.
        let ask = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Ask>()) };
        (ask.magic == MAGIC && ask.name_len <= MAX_NAME as u64).then_some(ask)
    }

    /// The kind of the question; `None` if this version does not know it.
    pub fn kind(&self) -> Option<AskKind> {
        let kinds = [AskKind::Anonymous, AskKind::MemoryFile, AskKind::Open, AskKind::Unlink];
        kinds.into_iter().find(|&kind| kind as u32 == self.kind)
    }

    /// The name, of at most [`MAX_NAME`] bytes.
    pub fn name(&self) -> &[u8] {
        &self.name[..(self.name_len as usize).min(MAX_NAME)]
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

const _: () = assert!(size_of::<Ask>() == 16 + 16 + MAX_NAME);

/// The answer to an [`Ask`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    magic: u32,
    /// An errno of Linux, or 0. With 0 the open file follows, except after [`AskKind::Unlink`].
    pub errno: i32,
}

impl Answer {
    /// An answer with this errno, or 0.
    pub const fn of(errno: i32) -> Answer {
        Answer { magic: MAGIC, errno }
    }

    /// Decodes an answer; `None` if the bytes are none.
    pub fn parse(bytes: &[u8]) -> Option<Answer> {
        if bytes.len() != size_of::<Answer>() {
            return None;
        }
        // SAFETY: the length was compared, and any bytes are a valid Answer.
        let answer = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Answer>()) };
        (answer.magic == MAGIC).then_some(answer)
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ask_and_answer_parse_from_their_bytes() {
        let mut ask = Ask::new(AskKind::Open, b"/name").unwrap();
        (ask.flags, ask.mode, ask.bytes) = (1, 0o600, 4096);
        let read = Ask::parse(ask.as_bytes()).unwrap();
        assert_eq!((read.kind(), read.name()), (Some(AskKind::Open), &b"/name"[..]));
        assert_eq!((read.flags, read.mode, read.bytes), (1, 0o600, 4096));
        assert!(Ask::parse(&ask.as_bytes()[1..]).is_none());
        assert!(Ask::new(AskKind::Open, &[b'x'; MAX_NAME + 1]).is_none());
        assert_eq!(Answer::parse(Answer::of(5).as_bytes()), Some(Answer::of(5)));
        assert_eq!(Answer::parse(&[0; 8]), None);
    }
}
