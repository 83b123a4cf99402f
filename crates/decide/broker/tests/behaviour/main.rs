//! The behaviour of the broker: properties and the scenarios of its paper.

mod common;
mod cores;
mod paper;
mod properties;
