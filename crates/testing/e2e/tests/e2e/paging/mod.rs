//! Programs on the pool: they start, run, fork and end as without, also when a pager is killed.

pub(crate) mod concurrent;
pub(crate) mod crash;
pub(crate) mod fork;
pub(crate) mod life;
pub(crate) mod limit;
pub(crate) mod pool;
pub(crate) mod programs;
pub(crate) mod redis;
pub(crate) mod swap;
pub(crate) mod traffic;
pub(crate) mod unprivileged;
