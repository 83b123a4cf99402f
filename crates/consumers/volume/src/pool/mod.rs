//! Moves a volume's pages to donors and back.

pub(crate) mod fetch;
pub(crate) mod lanes;
pub(crate) mod scrub;
pub(crate) mod sealing;
pub(crate) mod settle;
pub(crate) mod store;
