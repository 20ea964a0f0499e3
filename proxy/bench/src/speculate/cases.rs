//! What is asked: replies that repeat much of their prompt, some of it, and nothing.

use std::sync::Arc;

use baton_proxy::serve::CommandFailure;
use baton_schemas::MessageRole;
use baton_schemas::constraint::Constraint;
use baton_schemas::generate::{Conversation, Message};
use serde_json::{Value, json};

use crate::backends::model::BackendModel;

/// A question, and the tokens of its reply.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpeculationCase {
    pub(super) name: &'static str,
    question: &'static str,
    /// What the question is about.
    text: &'static str,
    is_json: bool,
}

/// The questions for a model. What random weights say is noise, so they get one short text.
pub(super) fn of(model: &BackendModel) -> &'static [SpeculationCase] {
    match model {
        BackendModel::Real(_) => &CASES,
        BackendModel::MadeUp(_) => &NOISE,
    }
}

const NOISE: [SpeculationCase; 1] = [SpeculationCase {
    name: "random weights",
    question: "The keeper of the lighthouse found a letter in a bottle.",
    text: "",
    is_json: false,
}];

const CASES: [SpeculationCase; 4] = [
    SpeculationCase {
        name: "editing code",
        question: "Rename the function `area` to `surface` in this program. Repeat the whole program and nothing else.",
        text: CODE,
        is_json: false,
    },
    SpeculationCase {
        name: "summarising",
        question: "Summarise this report in five sentences. Keep its names and figures.",
        text: REPORT,
        is_json: false,
    },
    SpeculationCase {
        name: "JSON by a schema",
        question: "List every vessel of this report as JSON, with its name, its port and its tonnage.",
        text: REPORT,
        is_json: true,
    },
    SpeculationCase {
        name: "free prose",
        question: "Tell a story about a lighthouse keeper who finds a letter in a bottle.",
        text: "",
        is_json: false,
    },
];

const CODE: &str = r#"
class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)

class Square(Rectangle):
    def __init__(self, side):
        super().__init__(side, side)

def total_area(shapes):
    total = 0
    for shape in shapes:
        total += shape.area()
    return total

def largest(shapes):
    best = None
    for shape in shapes:
        if best is None or shape.area() > best.area():
            best = shape
    return best

shapes = [Rectangle(2, 3), Square(4), Rectangle(5, 1)]
print("total area:", total_area(shapes))
print("largest area:", largest(shapes).area())
"#;

const REPORT: &str = "Harbour report of the third quarter. The cutter Albatross of Dover, 240 tonnes, made eleven voyages to \
    Calais and carried mail and 1,320 passengers. The steamer Northern Light of Aberdeen, 1,150 tonnes, lay in dock for six \
    weeks after her boiler had cracked; the repair cost 4,700 pounds. The brig Margaret of Whitby, 310 tonnes, brought timber \
    from Riga four times. The steamer Great Belt of Copenhagen, 980 tonnes, came every second Tuesday with butter and bacon, \
    2,400 barrels in all. The schooner Swallow of Cork, 150 tonnes, was lost on the Goodwin Sands on 2 September; the crew of \
    seven was saved by the lifeboat Charlotte. Dues came to 18,260 pounds, which is 900 pounds less than in the second \
    quarter, because the Northern Light did not sail.";

impl SpeculationCase {
    /// The question. `number` makes its beginning another one, so that no prompt is cached.
    pub(super) fn text(&self, number: u32) -> String {
        format!("({number}) {}\n\n{}", self.question, self.text)
    }

    /// The same as a chat.
    pub(super) fn conversation(&self, number: u32) -> Conversation {
        let messages = vec![Message::new(MessageRole::User, self.text(number))];
        Conversation { messages, ..Conversation::default() }
    }

    /// The schema of the reply, if it has one.
    pub(super) fn schema(&self) -> Option<Value> {
        let vessel = json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "port": {"type": "string", "maxLength": 40},
                "tonnage": {"type": "integer", "minimum": 1, "maximum": 9999},
            },
            "required": ["name", "port", "tonnage"], "additionalProperties": false,
        });
        self.is_json.then(|| {
            json!({
                "type": "object",
                "properties": {"vessels": {"type": "array", "items": vessel, "minItems": 4, "maxItems": 8}},
                "required": ["vessels"], "additionalProperties": false,
            })
        })
    }

    pub(super) fn constraint(&self) -> Result<Option<Arc<Constraint>>, CommandFailure> {
        let Some(schema) = self.schema() else { return Ok(None) };
        let constraint = Constraint::json_schema(schema, "response_format", false);
        constraint.map(|constraint| Some(Arc::new(constraint))).map_err(|error| CommandFailure(error.to_string()))
    }
}
