//! The behaviour of the manager inside a guest.

mod governor;
mod manager;
