//! The kernel's messages (include/uapi/linux/fuse.h): numbers, and what they are made of.
//!
//! Integers are in the machine's order. Messages of the kernel count as well formed, but are not
//! read beyond the bytes that have come: missing bytes read as zeros.

use rustix::io::Errno;

/// The version of the protocol that is spoken. Later versions are not needed.
pub const MAJOR: u32 = 7;
/// Minor version of Linux 5.4, which has all that the answers here rely on.
pub const MIN_MINOR: u32 = 31;
/// The minor version that the server tells the kernel.
const MINOR: u32 = 31;

/// Bytes before the arguments of a request.
pub const IN_HEADER_BYTES: usize = 40;
/// Bytes before an answer.
pub const OUT_HEADER_BYTES: usize = 16;
/// Bytes of a write's arguments, before its data.
const WRITE_ARGUMENTS_BYTES: usize = 40;
/// Where the data of a write begin in its message.
pub const WRITE_DATA_AT: usize = IN_HEADER_BYTES + WRITE_ARGUMENTS_BYTES;
/// Most bytes of any request's arguments.
const MAX_ARGUMENTS_BYTES: usize = 128;

/// The number of the file: the mount's root.
const ROOT: u64 = 1;

/// The operations that the kernel asks for.
#[expect(missing_docs, reason = "these are the kernel's names")]
pub mod opcode {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// Capabilities, which the two sides exchange first.
pub mod init {
    /// Several reads at once.
    pub const ASYNC_READ: u32 = 1;
    /// Writes of more than a page.
    pub const BIG_WRITES: u32 = 1 << 5;
    /// Several direct reads and writes at once.
    pub const ASYNC_DIO: u32 = 1 << 15;
    /// Requests of more than 32 pages.
    pub const MAX_PAGES: u32 = 1 << 22;
    /// There are further flags, in a word of their own.
    pub const EXTENDED: u32 = 1 << 30;
    /// A further flag: requests through io_uring (Linux 6.14).
    pub const OVER_URING: u32 = 1 << 9;
}

/// The attributes that SETATTR changes.
#[expect(missing_docs, reason = "these are the kernel's names")]
pub mod set {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const MTIME: u32 = 1 << 5;
    /// Through an open file, and not by its name.
    pub const HANDLE: u32 = 1 << 6;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// The code of [`resend`] (Linux 6.9).
const NOTIFY_RESEND: i32 = 7;

/// A request, without the data of a write.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// See [`opcode`].
    pub opcode: u32,
    /// The kernel matches the answer to the request by this number.
    pub unique: u64,
    /// The bytes after the header, padded with zeros.
    arguments: [u8; MAX_ARGUMENTS_BYTES],
}

impl Request {
    /// Decodes a whole message. None if it is shorter than its header.
    pub fn decode(message: &[u8]) -> Option<Request> {
        let (header, rest) = message.split_at_checked(IN_HEADER_BYTES)?;
        Some(Request::of_parts(header, rest))
    }

    /// Decodes a request whose header and arguments are in two places.
    pub fn of_parts(header: &[u8], rest: &[u8]) -> Request {
        let mut arguments = [0; MAX_ARGUMENTS_BYTES];
        let bytes = rest.len().min(MAX_ARGUMENTS_BYTES);
        arguments[..bytes].copy_from_slice(&rest[..bytes]);
        Request { opcode: u32_at(header, 4), unique: u64_at(header, 8), arguments }
    }

    /// Whether it changes the file's contents or attributes.
    pub fn changes_the_file(&self) -> bool {
        matches!(self.opcode, opcode::SETATTR | opcode::WRITE | opcode::FALLOCATE)
    }

    /// Whether the first message offers requests through io_uring.
    pub fn offers_uring(&self) -> bool {
        self.u32_at(12) & init::EXTENDED != 0 && self.u32_at(16) & init::OVER_URING != 0
    }

    /// The number at byte `at` of the arguments.
    pub fn u32_at(&self, at: usize) -> u32 {
        u32_at(&self.arguments, at)
    }

    /// The number at byte `at` of the arguments.
    pub fn u64_at(&self, at: usize) -> u64 {
        u64_at(&self.arguments, at)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..at + 4).unwrap_or(&[0; 4]);
    u32::from_ne_bytes(found.try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..at + 8).unwrap_or(&[0; 8]);
    u64::from_ne_bytes(found.try_into().expect("eight bytes"))
}

/// The header of an answer. `error` is an errno of Linux, or 0; after an error nothing follows.
pub fn answer_header(unique: u64, error: i32, bytes: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut header = [0; OUT_HEADER_BYTES];
    header[..4].copy_from_slice(&((OUT_HEADER_BYTES + bytes) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&(-error).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// The message that makes the kernel send again each request that was read and not answered.
pub fn resend() -> [u8; OUT_HEADER_BYTES] {
    answer_header(0, -NOTIFY_RESEND, 0)
}

/// The answer to a request.
pub enum Reply {
    /// Success, with this many bytes from the start of the buffer.
    Bytes(usize),
    /// An error.
    Error(Errno),
    /// The kernel expects no answer.
    Nothing,
}

/// The body of an answer: integers, one after another.
pub struct Answer<const BYTES: usize> {
    bytes: [u8; BYTES],
    filled: usize,
}

impl<const BYTES: usize> Answer<BYTES> {
    /// A body of zeros, to be filled from its start.
    #[expect(clippy::new_without_default, reason = "an answer is made to be filled")]
    pub fn new() -> Self {
        Answer { bytes: [0; BYTES], filled: 0 }
    }

    /// Adds 16 bits.
    pub fn u16(self, value: u16) -> Self {
        self.put(&value.to_ne_bytes())
    }

    /// Adds 32 bits.
    pub fn u32(self, value: u32) -> Self {
        self.put(&value.to_ne_bytes())
    }

    /// Adds 64 bits.
    pub fn u64(self, value: u64) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn put(mut self, value: &[u8]) -> Self {
        self.bytes[self.filled..self.filled + value.len()].copy_from_slice(value);
        self.filled += value.len();
        self
    }

    /// Copies the body to the start of `buffer`, and returns the reply that sends it.
    pub fn put_in(&self, buffer: &mut [u8]) -> Reply {
        buffer[..BYTES].copy_from_slice(&self.bytes);
        Reply::Bytes(BYTES)
    }
}

/// The answer to INIT, the first message.
pub fn init_answer(
    max_readahead: u32,
    flags: u32,
    further_flags: u32,
    background: u16,
    max_io: u32,
) -> Answer<64> {
    Answer::new()
        .u32(MAJOR)
        .u32(MINOR)
        .u32(max_readahead)
        .u32(flags)
        .u16(background)
        // From so many on the kernel holds others back.
        .u16(background / 4 * 3)
        .u32(max_io)
        // Times are told in seconds.
        .u32(1_000_000_000)
        .u16((max_io / 4096) as u16)
        .u16(0)
        .u32(further_flags)
}

/// The attributes of the file.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// Length, in bytes.
    pub size_bytes: u64,
    /// Bytes that are stored: holes do not count.
    pub data_bytes: u64,
    /// Time of the last change, in seconds since 1970.
    pub modified_s: u64,
    /// Kind of file and permissions, as in `stat`.
    pub mode: u32,
    /// User ID of the owner.
    pub user: u32,
    /// Group ID of the owner.
    pub group: u32,
}

impl Attributes {
    /// The answer to GETATTR and SETATTR. The kernel may cache it for `valid_s` seconds.
    pub fn answer(&self, valid_s: u64) -> Answer<104> {
        let head = Answer::new().u64(valid_s).u64(0);
        let of_file = head.u64(ROOT).u64(self.size_bytes).u64(self.data_bytes / 512);
        let times = of_file.u64(self.modified_s).u64(self.modified_s).u64(self.modified_s);
        let rest = times.u32(0).u32(0).u32(0).u32(self.mode).u32(1);
        rest.u32(self.user).u32(self.group).u32(0).u32(4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_are_as_the_kernel_reads_them() {
        let header = answer_header(7, 5, 104);
        assert_eq!((u32_at(&header, 0), u64_at(&header, 8)), (120, 7));
        assert_eq!(u32_at(&header, 4) as i32, -5);
        assert_eq!((u64_at(&resend(), 8), u32_at(&resend(), 4)), (0, 7));
        let attributes = Attributes {
            size_bytes: 8192,
            data_bytes: 4096,
            modified_s: 9,
            mode: 0o100_600,
            user: 3,
            group: 4,
        };
        let answer = attributes.answer(1);
        let bytes = &answer.bytes;
        assert_eq!([0, 24, 32].map(|at| u64_at(bytes, at)), [1, 8192, 8]);
        assert_eq!([76, 80, 84, 88, 96].map(|at| u32_at(bytes, at)), [0o100_600, 1, 3, 4, 4096]);
        let answer = init_answer(65536, init::MAX_PAGES, init::OVER_URING, 64, 1 << 18);
        let bytes = &answer.bytes;
        assert_eq!(
            [0, 4, 8, 20, 24, 32].map(|at| u32_at(bytes, at)),
            [7, 31, 65536, 1 << 18, 1_000_000_000, 1 << 9]
        );
        assert_eq!(bytes[28..30], 64u16.to_ne_bytes());
    }

    proptest! {
        #[test]
        fn nothing_is_read_beyond_a_message(
            message in prop::collection::vec(any::<u8>(), 0..100),
            at in 0usize..200,
        ) {
            let Some(request) = Request::decode(&message) else {
                prop_assert!(message.len() < IN_HEADER_BYTES);
                return Ok(());
            };
            if IN_HEADER_BYTES + at >= message.len() {
                prop_assert_eq!(request.u64_at(at), 0);
                prop_assert_eq!(request.u32_at(at), 0);
            }
        }
    }
}
