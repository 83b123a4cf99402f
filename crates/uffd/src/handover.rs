//! What `libhecaton.so` and the pager say to each other.
//!
//! One `SOCK_SEQPACKET` connection an address space: it opens with [`Attach`] (with the userfaultfd
//! by `SCM_RIGHTS`) and [`Welcome`]. After that the pager sends [`Command`]s to the helper thread in
//! the program and gets one [`Reply`] to each. When the connection ends, the address space is gone:
//! the helper lives exactly as long as it does.
//!
//! Plain structures in the machine's byte order: both ends are on one host and of one version, and
//! a version that differs is refused.

use std::mem::size_of;

/// First word of [`Attach`] and [`Welcome`]: the protocol and its version.
pub const MAGIC: u32 = 0x4845_4305;

/// The environment variable that names the pager's socket.
pub const SOCKET_VARIABLE: &str = "HECATON_PAGER";

/// The environment variable that names the node's control socket, in a virtual machine that
/// somebody else than Hecaton starts: the library asks there for a pager when the machine makes its
/// memory.
pub const NODE_VARIABLE: &str = "HECATON_NODE";

/// The environment variable with what the library then asks for: one line of JSON, as the node
/// reads it.
pub const REQUEST_VARIABLE: &str = "HECATON_VM";

/// Most page runs in one command, and most pages that one [`Op::Take`] moves.
pub const MAX_RUNS: usize = 256;

/// Most ranges that an [`Attach`] announces.
pub const MAX_RANGES: usize = 120;

/// A page run: address and length in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// A new address space.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attach {
    /// [`MAGIC`].
    pub magic: u32,
    /// 1 when this is the child of a fork: no descriptor comes along, the kernel delivered it to
    /// the pager already, and the child's next fault is at `doorbell`.
    pub forked: u32,
    /// The process.
    pub pid: i32,
    /// Ranges used in `ranges`.
    pub range_count: u32,
    /// Where [`Op::Take`] moves pages to; [`MAX_RUNS`] pages. 0 when the kernel cannot move pages.
    pub area: u64,
    /// A page that is registered and missing, to be touched once by a forked child.
    pub doorbell: u64,
    /// The library's own memory (the helper's stack, the area, the doorbell): never registered by
    /// the pager, never evicted.
    pub own: Range,
    /// What is registered and may already hold pages.
    pub ranges: [Range; MAX_RANGES],
}

/// The pager's answer to [`Attach`]; a forked child gets its userfaultfd along with it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u32,
    /// Who may read the process's memory (for `PR_SET_PTRACER`): the pager or an ancestor of it.
    pub reader: i32,
}

/// What a [`Command`] asks for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Answer, once everything before is done.
    Barrier = 1,
    /// Empty the area, then move each run to it, one after the other; [`Reply::done`] holds the
    /// pages moved of each run.
    Take = 2,
    /// `MADV_DONTNEED` on each run; [`Reply::done`] holds the pages of each run, or 0.
    Drop = 3,
    /// Empty the area. No reply.
    Clear = 4,
}

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
    /// The command's.
    pub nonce: u64,
    /// Pages done of each run.
    pub done: [u32; MAX_RUNS],
}

/// Bytes of a command with `count` runs: what is sent of the structure.
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
