//! How many descriptors a process may have.

use rustix::process::{Resource, getrlimit, setrlimit};
use std::io;

/// Raises this process's limit, and that of its children, as far as it goes: a node holds some descriptors for each
/// process of each consumer, its pagers have as many themselves, and a donor or a manager has one for each
/// connection. The usual limit of 1024 is for programs that use `select`.
pub fn raise_limit() -> io::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_as_high_as_it_may_be() {
        raise_limit().unwrap();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
