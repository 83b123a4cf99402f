//! Raises the limits of daemons (`ulimit`): those that they inherit are meant for programs.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A node holds some descriptors for each process of each consumer, its pagers have as many
/// themselves, and a donor or a manager has one for each connection. The usual limit of 1024 is for
/// programs that use `select`.
const OPEN_FILES: u64 = 1 << 20;

/// Each with the wanted value; `None`: no limit. Donors map all that they lend, and a pager the
/// addresses of all pages that a program may have.
const WANTED: [(Resource, Option<u64>); 7] = [
    (Resource::As, None),
    (Resource::Cpu, None),
    (Resource::Data, None),
    (Resource::Fsize, None),
    (Resource::Memlock, None),
    (Resource::Nofile, Some(OPEN_FILES)),
    (Resource::Nproc, None),
];

/// Raises the limits of this process, and of the daemons that it starts, as far as it may: above
/// the hard limits that takes CAP_SYS_RESOURCE.
pub fn raise() {
    for (resource, wanted) in WANTED {
        let now = getrlimit(resource);
        let most = now.maximum.zip(wanted).map(|(now, wanted)| now.max(wanted));
        let all = Rlimit { current: most, maximum: most };
        let up_to_hard = Rlimit { current: now.maximum, maximum: now.maximum };
        // Lower than wanted is good enough for most uses; what fails for it says so.
        let _ = setrlimit(resource, all).or_else(|_| setrlimit(resource, up_to_hard));
    }
}

/// The limit of this process that explains a failure, by the text of that; `None` if no limit does.
pub fn in_the_way(failure: &str) -> Option<String> {
    const KIB: u64 = 1024;
    let (resource, name, option, unit) = [
        ("(os error 12)", Resource::As, "address space", "-v", KIB),
        ("(os error 24)", Resource::Nofile, "open files", "-n", 1),
        ("(os error 11)", Resource::Nproc, "processes", "-u", 1),
    ]
    .into_iter()
    .find_map(|(code, resource, name, option, unit)| {
        failure.contains(code).then_some((resource, name, option, unit))
    })?;
    let limit = getrlimit(resource).current? / unit;
    let unit = if unit == KIB { " KiB" } else { "" };
    Some(format!("the limit of {name} is {limit}{unit}; raise it with `ulimit {option}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_as_high_as_they_may_be() {
        raise();
        for (resource, _) in WANTED {
            let limit = getrlimit(resource);
            assert_eq!(limit.current, limit.maximum);
        }
    }

    #[test]
    fn failure_of_another_kind_is_not_explained() {
        assert_eq!(in_the_way("connection refused (os error 111)"), None);
        let open_files = getrlimit(Resource::Nofile).current.map(|limit| limit.to_string());
        let said = in_the_way("cannot open x: Too many open files (os error 24)");
        assert_eq!(said.is_some(), open_files.is_some());
        assert!(open_files.is_none_or(|limit| said.unwrap().contains(&limit)));
    }
}
