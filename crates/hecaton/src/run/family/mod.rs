//! Takes care of the processes of a program beside the first.

pub(super) mod left_behind;
pub(super) mod orphans;
