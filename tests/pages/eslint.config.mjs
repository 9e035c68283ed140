// The scripts of a page are joined to one script, so each can use the declarations of the others.
import js from "@eslint/js";
import globals from "globals";

const ALLOWED = ["data", "lane", "step", "lanes", "choose", "event", "name", "view", "keys", "wait", "first", "live"];

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2024, sourceType: "script", globals: globals.browser },
    rules: {
      "no-undef": "off", // TypeScript checks names across files.
      "no-unused-vars": ["error", { vars: "local", args: "after-used" }],
      "no-var": "error",
      "prefer-const": "error",
      eqeqeq: "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-restricted-properties": [
        "error",
        { property: "innerHTML", message: "insert a log's texts as text, so that they are not parsed as HTML" },
      ],
      "no-shadow": ["error", { builtinGlobals: false, allow: ALLOWED }],
      "max-lines-per-function": ["error", { max: 90, skipBlankLines: true, skipComments: true }],
    },
  },
];
