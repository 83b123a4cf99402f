//! Defines the protocol between `libhecaton.so` and the pager.
//!
//! Each address space has one `SOCK_SEQPACKET` connection. It opens with [`Attach`] (with the
//! userfaultfd by `SCM_RIGHTS`) and an [`Answer`]. After that the pager sends [`Command`]s to the
//! program's helper and gets one [`Reply`] to each, unless its [`Op`] has none. When the connection
//! ends, the address space is gone, or somebody has killed the helper.
//!
//! The parent opens a child's connection before the fork:
//!
//! | from | message | next action |
//! |---|---|---|
//! | parent | [`Kind::Fork`] | waits |
//! | pager | [`Step::Go`] | leaves the parent's memory as it is |
//! | or pager | [`Step::Again`] | closes the connection; the parent begins anew |
//! | parent | nothing | forks, and closes its copy of the connection |
//! | child | [`Kind::Child`], with a userfaultfd of its own | waits |
//! | pager | [`Step::Welcome`] | serves both |
//!
//! A pager may be killed at any point of this exchange. Its successor has the pager's records, but
//! not what was in a message. So each side asks again: the parent by another connection if this one
//! ends before `Go`, the successor by another `Go`. The child then repeats its message.
//!
//! A program that has become another user, or no longer sees the path of the pager's socket,
//! connects to an abstract address. It sends [`Knock`] first ([`Door`]).
//!
//! Messages are plain structures in the machine's byte order: both ends are on one host and of one
//! version. Another version is refused.

use std::ffi::CStr;
use std::mem::size_of;

/// First word of [`Attach`] and [`Answer`]: the protocol and its version.
pub const MAGIC: u32 = 0x4845_4308;

/// Name of helpers in `/proc/PID/comm`.
pub const HELPER_NAME: &CStr = c"hecaton";

/// The environment variable that names the pager's socket.
pub const SOCKET_VARIABLE: &str = "HECATON_PAGER";

/// The environment variable with the consumer's [`Door`].
pub const KEY_VARIABLE: &str = "HECATON_KEY";

/// The environment variable with the bytes of the largest mapping that a program may make, in
/// decimal.
pub const LARGEST_MAPPING_VARIABLE: &str = "HECATON_LARGEST_MAPPING";

/// The environment variable with the bytes of local memory, in decimal. They limit locked memory.
pub const LOCAL_VARIABLE: &str = "HECATON_LOCAL";

/// The environment variable with the launcher's process number. The program that it starts must not
/// run on local memory unnoticed; programs that this program starts may.
pub const LAUNCHER_VARIABLE: &str = "HECATON_LAUNCHER";

/// The environment variable that names the node's control socket, for a VM that is not started by
/// Hecaton. The library asks there for a pager when the hypervisor makes the VM's memory.
pub const NODE_VARIABLE: &str = "HECATON_NODE";

/// The environment variable with the library's request to that node: one line of JSON.
pub const REQUEST_VARIABLE: &str = "HECATON_VM";

/// Most page runs in one command, and most pages that one [`Op::Take`] moves.
pub const MAX_RUNS: usize = 256;

/// Most ranges that an [`Attach`] announces.
pub const MAX_RANGES: usize = 120;

/// Most bytes of a mapping that is paged although libc's `mmap` did not make it. A larger mapping
/// is a table over the whole address space, as sanitizers have it. Hardly a page of it is in use,
/// and the search for these pages takes minutes.
pub const LARGEST_FOUND_BYTES: u64 = 1 << 40;

/// A page run: address and length in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// A consumer's key.
pub type Key = [u64; 2];

/// Address and key for programs that cannot reach the path of the pager's socket. Written in 48
/// hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Door {
    /// The abstract address. It is random, so that no other process can take it before the pager.
    pub name: [u8; 24],
    /// The consumer's key.
    pub key: Key,
}

impl Door {
    /// Parses the hexadecimal digits.
    pub fn of(text: &[u8]) -> Option<Door> {
        let (digits, rest) = text.as_chunks::<16>();
        let [public, high, low] = digits else { return None };
        let word = |digits: &[u8; 16]| {
            digits.iter().try_fold(0u64, |word, digit| {
                let value = char::from(*digit).to_digit(16)?;
                Some(word << 4 | u64::from(value))
            })
        };
        word(public)?;
        let mut name = *b"hecaton-................";
        name[8..].copy_from_slice(public);
        let key = [word(high)?, word(low)?];
        rest.is_empty().then_some(Door { name, key })
    }
}

/// The request of a program that connects to the pager's abstract address.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Sends [`Attach`] next.
    Attach = 1,
    /// Asks for `/dev/userfaultfd`, opened: the descriptor comes with [`Step::Go`].
    Device = 2,
}

/// The first packet on a connection to the abstract address, to which any process can connect.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Knock {
    /// [`MAGIC`].
    pub magic: u32,
    /// A [`Wish`].
    pub wish: u32,
    /// The consumer's key.
    pub key: Key,
}

impl Knock {
    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

const _: () = assert!(size_of::<Knock>() == 8 + 16);

/// Sender of an [`Attach`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A program that has just started.
    Program = 1,
    /// A program that is about to fork. `ranges` are pages to which the kernel writes whenever the
    /// forking thread runs, and the rest of the message is unused.
    Fork = 2,
    /// The child of that fork.
    Child = 3,
}

/// A new address space.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attach {
    /// [`MAGIC`].
    pub magic: u32,
    /// A [`Kind`].
    pub kind: u32,
    /// Ranges used in `ranges`.
    pub range_count: u32,
    /// Entries of the table at `left_alone`.
    pub left_alone_count: u32,
    /// Where [`Op::Take`] moves pages to: [`MAX_RUNS`] pages. 0 if the kernel cannot move pages.
    pub area: u64,
    /// The library's own memory (stacks, the area): never registered by the pager, never evicted.
    pub own: Range,
    /// In `own`: a table of [`Range`]s, empty ones included, that the pager must not register
    /// although they look like any other memory (threads' stacks, locked memory).
    pub left_alone: u64,
    /// [`USES_WIPE_ON_FORK`] or 0.
    pub flags: u64,
    /// Of a new program: registered ranges that may already hold pages. Of a parent: see
    /// [`Kind::Fork`]. Of a child: none. The pager registers the ranges whose entries it has
    /// copied, and others that are worth it.
    pub ranges: [Range; MAX_RANGES],
}

impl Attach {
    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

const _: () = assert!(size_of::<Attach>() == 16 + 8 + 16 + 8 + 8 + MAX_RANGES * 16);

/// In [`Attach::flags`] of a child: parts of its memory may have to be empty (`MADV_WIPEONFORK`).
/// The kernel tells which parts.
pub const USES_WIPE_ON_FORK: u64 = 1;

/// Decision of the pager in an [`Answer`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// To a parent: fork now. To a child: say again who you are.
    Go = 1,
    /// The pager serves the address space.
    Welcome = 2,
    /// The pager does not serve the address space.
    Refused = 3,
    /// To a parent: a page of its `ranges` is not in memory, or not to be written to without a
    /// fault. Bring them in and ask again.
    Again = 4,
}

/// The pager's answer to [`Attach`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// [`MAGIC`]. No [`Op`] has this number, so a helper recognizes a repeated answer.
    pub magic: u32,
    /// A [`Step`].
    pub step: u32,
}

impl Answer {
    /// The answer `step`.
    pub const fn new(step: Step) -> Answer {
        Answer { magic: MAGIC, step: step as u32 }
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: a `repr(C)` structure of integers without padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Operation of a [`Command`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reply once all earlier commands are done.
    Barrier = 1,
    /// Empty the area, then move each run to it, one after the other; [`Reply::done`] holds the
    /// pages moved of each run.
    Take = 2,
    /// `MADV_DONTNEED` on each run, after [`Op::Hold`]; [`Reply::done`] holds the pages of each
    /// run, or 0.
    Drop = 3,
    /// Empty the area. No reply.
    Clear = 4,
    /// Keep the runs from children that the program makes past the library. No reply: the helper
    /// executes commands in order.
    Withhold = 5,
    /// Keep libc from changing the program's mappings until the next command other than
    /// [`Op::Clear`] and [`Op::Withhold`] is done. Takes one empty run. [`Reply::done`] holds
    /// [`HELD`], [`NEVER_HELD`], or 0 if libc's calls kept the helper waiting too long.
    Hold = 6,
}

/// The answer to [`Op::Hold`]: libc changes no mappings.
pub const HELD: u32 = 1;
/// The answer of a program without glibc: it may change its mappings at any time.
pub const NEVER_HELD: u32 = 2;

/// From the pager to the helper.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// An [`Op`].
    pub op: u32,
    /// Runs used in `runs`.
    pub count: u32,
    /// Comes back in the reply.
    pub nonce: u64,
    /// The pages meant, for [`Op::Take`] and [`Op::Drop`].
    pub runs: [Range; MAX_RUNS],
}

/// From the helper to the pager.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// The command's nonce.
    pub nonce: u64,
    /// Pages done of each run.
    pub done: [u32; MAX_RUNS],
}

/// Bytes to send of a command with `count` runs.
pub const fn command_len(count: usize) -> usize {
    size_of::<Command>() - (MAX_RUNS - count) * size_of::<Range>()
}

impl Command {
    /// A command with no runs yet.
    pub const fn new(op: Op, nonce: u64) -> Command {
        Command { op: op as u32, count: 0, nonce, runs: [Range { start: 0, len: 0 }; MAX_RUNS] }
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        let len = command_len(self.count as usize);
        // SAFETY: a `repr(C)` structure of integers without padding, and `len` is within it.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), len) }
    }
}
