//! The page protocol over TCP.

pub mod protocol;
