//! Defines the messages about shared memory: of `libhecaton.so` to the keeper, and of the keeper to
//! the programs' pager.
//!
//! Each question has a `SOCK_SEQPACKET` connection of its own. The program sends an [`Ask`]. The
//! keeper sends an [`Answer`], with the open file as a descriptor. To an [`Unmap`] the pager sends
//! nothing: it closes the connection. All are plain structures in the machine's byte order, as in
//! [`crate::handover`].

use crate::handover::MAGIC;

/// The path of the keeper's socket is that of the pager's socket with this suffix.
pub const SOCKET_SUFFIX: &str = ".files";

/// `f_files` of the pager's file systems: `fstatfs` recognizes their files by it.
pub const STATFS_MARK: u64 = 0x4845_4341_544f_4e53;

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

/// Most runs in one [`Unmap`].
pub const MAX_FILE_RUNS: usize = 256;

/// Pages of a file.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct FileRun {
    /// The file's inode number.
    pub node: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Drop these pages from the page tables of all programs. Their contents stay in the page cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Unmap {
    magic: u32,
    count: u32,
    /// Major and minor number of the file system's device.
    pub device: [u32; 2],
    runs: [FileRun; MAX_FILE_RUNS],
}

/// First word of [`Unmap`]. Unlike [`MAGIC`], so that the pager can tell the messages apart.
const UNMAP_MAGIC: u32 = 0x4845_5501;

/// Bytes before the runs.
const UNMAP_HEAD_BYTES: usize = 16;

const _: () = assert!(size_of::<Unmap>() == UNMAP_HEAD_BYTES + 24 * MAX_FILE_RUNS);

impl Unmap {
    /// A message with the first [`MAX_FILE_RUNS`] of these runs.
    pub fn new(device: [u32; 2], runs: &[FileRun]) -> Unmap {
        let count = runs.len().min(MAX_FILE_RUNS);
        let mut stored = [FileRun::default(); MAX_FILE_RUNS];
        stored[..count].copy_from_slice(&runs[..count]);
        Unmap { magic: UNMAP_MAGIC, count: count as u32, device, runs: stored }
    }

    /// Decodes a message; `None` if the bytes are none.
    pub fn parse(bytes: &[u8]) -> Option<Unmap> {
        let mut unmap = Unmap::new([0; 2], &[]);
        if bytes.len() < UNMAP_HEAD_BYTES || bytes.len() > size_of::<Unmap>() {
            return None;
        }
        let to = (&raw mut unmap).cast::<u8>();
        // SAFETY: `to` has room for them, and any bytes are a valid Unmap.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let count = unmap.count as usize;
        let is_whole = count <= MAX_FILE_RUNS && bytes.len() == UNMAP_HEAD_BYTES + 24 * count;
        (unmap.magic == UNMAP_MAGIC && is_whole).then_some(unmap)
    }

    /// The pages.
    pub fn runs(&self) -> &[FileRun] {
        &self.runs[..(self.count as usize).min(MAX_FILE_RUNS)]
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        let len = UNMAP_HEAD_BYTES + 24 * self.runs().len();
        // SAFETY: a `repr(C)` structure of integers without padding, of at least `len` bytes.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmap_parses_from_its_bytes() {
        let runs = [1, 2].map(|node| FileRun { node, offset: 4096, bytes: 8192 });
        let unmap = Unmap::new([0, 51], &runs);
        let read = Unmap::parse(unmap.as_bytes()).unwrap();
        assert_eq!((read.device, read.runs()), ([0, 51], &runs[..]));
        assert!(Unmap::parse(&unmap.as_bytes()[1..]).is_none());
        assert!(Unmap::parse(&unmap.as_bytes()[..40]).is_none());
        assert!(Unmap::parse(&[0; 7000]).is_none());
        let many = [runs[0]; MAX_FILE_RUNS + 1];
        assert_eq!(Unmap::new([0, 51], &many).runs().len(), MAX_FILE_RUNS);
    }

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
