//! What a role allows: pure, and all of it in one table.

use axum::http::Method;
use hecaton_pki::{Identity, Role};

/// What is asked of the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// To see nodes, donors and consumers: with the ids of their spaces.
    Look,
    /// To see which donors there are.
    Directory,
    /// To have nodes or donors do something.
    Order,
    /// To be this node.
    Be(&'a str),
}

/// Why a call is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// The role does not allow it.
    #[error("{who} may not {what}: that takes a certificate of the role {roles}")]
    Role {
        /// Who asked.
        who: String,
        /// For what.
        what: &'static str,
        /// Who may.
        roles: &'static str,
    },
    /// A node speaks for another.
    #[error("{who} may not speak for node `{node}`: a node needs a certificate of its own name")]
    OtherNode {
        /// Who asked.
        who: String,
        /// Whom it calls itself.
        node: String,
    },
}

/// What a route is for, whatever name is in its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// [`Call::Look`].
    Look,
    /// [`Call::Directory`].
    Directory,
    /// [`Call::Order`].
    Order,
    /// [`Call::Be`], with the name in the path.
    Be,
}

/// All routes, with their methods: what is not here is answered to nobody, and each is in `openapi.json`.
pub const ROUTES: &[(&str, &[&str], Purpose)] = &[
    ("/v1/status", &["GET"], Purpose::Look),
    ("/v1/overview", &["GET"], Purpose::Look),
    ("/v1/history", &["GET"], Purpose::Look),
    ("/v1/events", &["GET"], Purpose::Look),
    ("/metrics", &["GET"], Purpose::Look),
    ("/", &["GET"], Purpose::Look),
    ("/dashboard/{name}", &["GET"], Purpose::Look),
    // How to ask is no secret of the cluster's.
    ("/api/openapi.json", &["GET"], Purpose::Directory),
    ("/v1/donors", &["GET"], Purpose::Directory),
    ("/v1/donors/{name}/drain", &["POST", "DELETE"], Purpose::Order),
    ("/v1/donors/{name}/limit", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/nodes/{name}/remove", &["POST"], Purpose::Order),
    // To look at it is `/v1/status`.
    ("/v1/policy", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/harvest-quota", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/nodes/{name}/heartbeat", &["POST"], Purpose::Be),
    ("/v1/nodes/{name}", &["DELETE"], Purpose::Be),
];

/// What a request is, by its method, its route, and the name in its path. `None`: nobody has said who may,
/// so nobody may.
pub fn call_of<'a>(method: &Method, route: &str, name: &'a str) -> Option<Call<'a>> {
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    let (_, methods, purpose) = ROUTES.iter().find(|(known, ..)| *known == route)?;
    methods.contains(&method).then_some(match purpose {
        Purpose::Look => Call::Look,
        Purpose::Directory => Call::Directory,
        Purpose::Order => Call::Order,
        Purpose::Be => Call::Be(name),
    })
}

/// Whether `who` may.
pub fn check(who: &Identity, call: Call<'_>) -> Result<(), Forbidden> {
    let (what, roles) = match (call, who.role) {
        (Call::Look, Role::Admin | Role::ReadOnly) => return Ok(()),
        (Call::Look, _) => ("see the cluster", "read-only or admin"),
        (Call::Directory, Role::Admin | Role::ReadOnly | Role::Node) => return Ok(()),
        (Call::Directory, _) => ("see the donors", "node, read-only or admin"),
        (Call::Order, Role::Admin) => return Ok(()),
        (Call::Order, _) => ("give orders", "admin"),
        (Call::Be(name), Role::Node) if name == who.name => return Ok(()),
        (Call::Be(name), Role::Node) => {
            return Err(Forbidden::OtherNode { who: who.to_string(), node: name.to_owned() });
        }
        (Call::Be(_), _) => ("be a node", "node"),
    };
    Err(Forbidden::Role { who: who.to_string(), what, roles })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_may_do_what_it_is_for() {
        let calls = [Call::Look, Call::Directory, Call::Order, Call::Be("a"), Call::Be("b")];
        for (role, may) in [
            (Role::Manager, [false, false, false, false, false]),
            (Role::Node, [false, true, false, true, false]),
            (Role::Admin, [true, true, true, false, false]),
            (Role::ReadOnly, [true, true, false, false, false]),
            (Role::Export, [false, false, false, false, false]),
            (Role::Client, [false, false, false, false, false]),
        ] {
            let who = Identity { name: "a".to_owned(), role };
            let found = calls.map(|call| check(&who, call).is_ok());
            assert_eq!(found, may, "{who}");
        }
    }

    #[test]
    fn a_refusal_says_who_what_and_the_way_out() {
        let node = Identity { name: "a".to_owned(), role: Role::Node };
        let error = check(&node, Call::Order).expect_err("refused").to_string();
        assert_eq!(
            error,
            "node `a` may not give orders: that takes a certificate of the role admin"
        );
        let error = check(&node, Call::Be("b")).expect_err("refused").to_string();
        assert!(error.contains("node `a`") && error.contains("node `b`"), "{error}");
    }

    #[test]
    fn what_no_line_names_nobody_may() {
        assert_eq!(call_of(&Method::PUT, "/v1/status", ""), None);
        assert_eq!(call_of(&Method::GET, "/v2/anything", ""), None);
    }
}
