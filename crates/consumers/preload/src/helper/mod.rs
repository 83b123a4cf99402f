//! Does for the pager what only a process with the program's memory may do.
//!
//! It moves pages out, drops them, and keeps memory from children that are not followed, on the
//! pager's command ([`serve`]). It is a process of its own that shares the program's memory
//! ([`start`]) and has no rights ([`confine`]). It ends when the program ends or leaves its memory
//! by `exec` ([`program`]); the end of its connection is how the pager learns of either.
//!
//! Once the last copy of the program's userfaultfd is closed, the kernel answers its faults with
//! zeros. So the helper has one, and before it lets go of that it ends the program.
//!
//! It must never touch memory that the pager pages: the pager may be waiting for it. It shares
//! thread-local storage with the thread that started it, and must not touch that either.

mod confine;
mod program;
mod serve;
mod start;

pub(crate) use serve::Links;
pub(crate) use start::{let_go_of_parents_lifeline, start};
