//! The description of the API for programs, in OpenAPI 3.1: one file, kept by hand and held to the
//! routes by a test. The end-to-end tests have a fuzzer make requests of it.

use axum::http::header;
use axum::response::IntoResponse;

/// The file.
const DESCRIPTION: &str = include_str!("openapi.json");

pub(crate) async fn describe() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DESCRIPTION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::permission::ROUTES;
    use crate::{Keep, ManagerServer};
    use hecaton_node::cluster::heartbeat::ManagerLink;
    use hecaton_node::cluster::report::{HeartbeatAnswer, MemberReport, NodeReport};
    use hecaton_policy::cluster::member::Phase;
    use serde_json::Value;
    use std::collections::BTreeSet;

    fn description() -> Value {
        serde_json::from_str(DESCRIPTION).expect("JSON")
    }

    const METHODS: [&str; 5] = ["GET", "PUT", "POST", "DELETE", "PATCH"];

    fn described() -> BTreeSet<(String, String)> {
        let description = description();
        let paths = description["paths"].as_object().expect("paths");
        let operations = paths.iter().flat_map(|(path, operations)| {
            let methods = operations.as_object().expect("operations").keys();
            methods.map(|method| (path.clone(), method.to_uppercase()))
        });
        operations.collect()
    }

    fn routed() -> BTreeSet<(String, String)> {
        let routes = ROUTES.iter().flat_map(|(path, methods, _)| {
            methods.iter().map(|method| ((*path).to_owned(), (*method).to_owned()))
        });
        routes.collect()
    }

    #[test]
    fn all_routes_are_described_and_nothing_else() {
        assert_eq!(described(), routed());
    }

    /// For each path, the server serves the described methods and no others.
    #[test]
    fn what_is_described_is_served() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let address = ([127, 0, 0, 1], 0).into();
        let started = ManagerServer::start(address, Keep::InMemory, None);
        let server = runtime.block_on(started).expect("started");
        // A connection each: a server may close one after a refusal, with the next request on its
        // way.
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        let http: ureq::Agent = config.max_idle_connections(0).build().into();
        let described = described();
        for (path, _, _) in ROUTES {
            for method in METHODS {
                let url = format!("{}{}", server.url(), path.replace("{name}", "icon.svg"));
                let request = ureq::http::Request::builder().method(method).uri(url).body(());
                let status = http.run(request.expect("a request")).expect("answered").status();
                let is_described = described.contains(&((*path).to_owned(), method.to_owned()));
                assert_eq!(status.as_u16() != 405, is_described, "{method} {path}: {status}");
                assert_ne!(status.as_u16(), 403, "{method} {path} is in no line of the table");
            }
        }
        runtime.block_on(server.stop());
    }

    /// Checks that `value` has the required fields, and that described values have the right type.
    fn check(schema: &Value, value: &Value, schemas: &Value, at: &str) {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.rsplit('/').next().expect("a name");
            return check(&schemas[name], value, schemas, name);
        }
        for part in schema["allOf"].as_array().into_iter().flatten() {
            check(part, value, schemas, at);
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().expect("a name");
            assert!(value.get(name).is_some(), "{at} has no {name}: {value}");
        }
        if let (Some(properties), Some(values)) =
            (schema["properties"].as_object(), value.as_object())
        {
            for (name, value) in values {
                if let Some(schema) = properties.get(name) {
                    check(schema, value, schemas, &format!("{at}.{name}"));
                }
            }
        }
        for item in value.as_array().into_iter().flatten() {
            check(&schema["items"], item, schemas, at);
        }
        let kinds: Vec<&str> = match &schema["type"] {
            Value::String(kind) => vec![kind],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => return,
        };
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_u64() => "integer",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        assert!(kinds.contains(&kind), "{at} is {value}, and not {kinds:?}");
        if let Some(words) = schema["enum"].as_array() {
            assert!(words.contains(value), "{at} is {value}, and none of {words:?}");
        }
    }

    #[test]
    fn what_is_answered_is_as_described() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let address = ([127, 0, 0, 1], 0).into();
        let started = ManagerServer::start(address, Keep::InMemory, None);
        let server = runtime.block_on(started).expect("started");
        let description = description();
        let schemas = &description["components"]["schemas"];
        let described =
            |name: &str| serde_json::json!({ "$ref": format!("#/components/schemas/{name}") });
        let donor = crate::watching::overview::tests::donor("d", 1);
        let donor = hecaton_node::donors::DonorReport {
            address: Some(([127, 0, 0, 1], 7000).into()),
            ..donor
        };
        let report =
            NodeReport { name: "a".into(), boot: 1, donors: vec![donor], ..NodeReport::default() };
        let sent = serde_json::to_value(&report).expect("JSON");
        check(&described("NodeReport"), &sent, schemas, "report");
        let link = ManagerLink::new(&server.url(), None);
        let check_answer = |answer: &HeartbeatAnswer| {
            let answer = serde_json::to_value(answer).expect("JSON");
            check(&described("HeartbeatAnswer"), &answer, schemas, "answer");
        };
        let member = MemberReport { phase: Phase::Recovering, ..MemberReport::default() };
        let recovering = NodeReport { member, ..report.clone() };
        let answer = link.beat(&recovering).expect("taken");
        assert!(!answer.orders.orders.is_empty(), "it is let in");
        check_answer(&answer);
        let answer = link.beat(&report).expect("taken");
        assert!(!answer.list.donors.is_empty());
        check_answer(&answer);
        let status = ureq::get(format!("{}/v1/status", server.url())).call();
        let status = status.expect("answered").body_mut().read_json::<Value>().expect("JSON");
        check(&described("ClusterStatus"), &status, schemas, "status");
        assert_eq!(status["nodes"][0]["membership"], "active");
        runtime.block_on(server.stop());
    }
}
