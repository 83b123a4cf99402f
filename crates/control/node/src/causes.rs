//! An error and what caused it, in one line.

use std::error::Error;

/// `error`, then each of its sources, with colons between.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot listen")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn all_causes_stand_in_one_line() {
        let error = Outer(std::io::Error::other("the port is taken"));
        assert_eq!(with_causes(&error), "cannot listen: the port is taken");
    }
}
